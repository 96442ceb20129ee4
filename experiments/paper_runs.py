"""Runs that the paper's authors recorded, read from their names, and totals to reproduce.

A run name reads `{task}_{method}_{memory}[_{size}][_p{prompt}][_s{max length}]`. What a name leaves
out is the paper's default for that task: few-shot 4000 + 400 tokens, speculative 1016 of 6000 with
the 256-candidate tree, reasoning the recorded prompt and no limit. The reasoning ablation keeps its
prompt in the folder's name. Nothing is adjusted run by run, so a few rows do not match, and are
shown so: one few-shot run was recorded at other lengths than its name implies, and the ablation's
rows without a prompt hold a root 19 tokens longer than the recording's (another tokenizer?).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from deft.paper_io import paper_kv_bytes, paper_mask_bytes
from deft.shape import HeadShape
from experiments.recorded import FewShotReplay, ReasoningReplay, Replay, SpeculativeReplay
from experiments.recordings import load_reasoning, load_speculative, shared_file

# Llama-3-8B, Llama-3.1-8B and CodeLlama-7B agree in all that this counter looks at.
PAPER_SHAPE = HeadShape(num_qo_heads=32, num_kv_heads=8, head_dim=128)
PAPER_LAYERS = 32
# The prompt-length ablation names no model. Its KV_IO / Mask_IO is twice that of 32 query heads and
# its Mask_IO 1.5 times that of 32 layers, in every row alike: 64 heads x 48 layers, which is
# CodeLlama-34B.
_ABLATION_FOLDER = "ablation/prompt_len/"
_ABLATION_SHAPE = HeadShape(num_qo_heads=64, num_kv_heads=8, head_dim=128)
_ABLATION_LAYERS = 48
# Method in a run name -> how its KV is counted. The dense tree (Medusa) loads the tree once, DeFT's
# tree-index kernel is its node kernel under an earlier name.
METHODS = {
    "flatten": "flatten",
    "node": "node",
    "node_chunk": "node_chunk",
    "seq": "sequence",
    "tree": "flatten",
    "tree_index": "node",
}
# The methods that the project claims to reproduce; the other two are checked all the same.
CLAIMED_METHODS = ("flatten", "node", "node_chunk", "seq")
_RUN_NAME = re.compile(
    r"(?P<task>few_shot|speculative_decoding|\w+ToT)"
    r"_(?P<method>flatten|node_chunk|node|seq|tree_index|tree)_(?P<memory>paged|unpaged)"
    r"(?:_(?P<size>\d+))?(?:_p(?P<prompt>\d+))?(?:_s(?P<max_len>\d+))?"
)
_FOLDER_PROMPT = re.compile(r"/prompt_len/(\d+)$")
_COLUMNS = ("folder", "run", "KV_IO", "Mask_IO", "steps")


@dataclass(frozen=True)
class PaperRun:
    """One recorded run.

    Args:
        folder, name: where it lies and what it is called.
        task: "few_shot", "speculative_decoding" or a reasoning task.
        method: key of METHODS.
        size: width, candidates, or the number of the complete reasoning tree; None: not named.
        prompt_len, max_len: tokens; None: not named.
        kv_bytes, mask_bytes, steps: what was recorded.
    """

    folder: str
    name: str
    task: str
    method: str
    size: int | None
    prompt_len: int | None
    max_len: int | None
    kv_bytes: int
    mask_bytes: int
    steps: int

    def replay(self) -> Replay:
        """The replay that the run's name asks for."""
        return _replay(self.task, self.size, self.prompt_len, self.max_len)

    @property
    def _model(self) -> tuple[HeadShape, int]:
        if self.folder.startswith(_ABLATION_FOLDER):
            return _ABLATION_SHAPE, _ABLATION_LAYERS
        return PAPER_SHAPE, PAPER_LAYERS

    def counted_kv_bytes(self) -> int:
        """KV bytes of that replay in the paper's convention."""
        return paper_kv_bytes(METHODS[self.method], self.replay().counts, *self._model)

    def counted_mask_bytes(self) -> int:
        """Bit-mask bytes of that replay; 0 for methods without a bit mask."""
        method = "node" if self.method == "tree" else METHODS[self.method]
        return paper_mask_bytes(method, self.replay().counts, self._model[1])


@lru_cache(maxsize=128)
def _replay(task: str, size: int | None, prompt_len: int | None, max_len: int | None) -> Replay:
    if task == "few_shot":
        prompt = 4000 if prompt_len is None else prompt_len
        limit = prompt + 400 if max_len is None else max_len
        return FewShotReplay(prompt, 20 if size is None else size, limit - prompt - 1)
    if task == "speculative_decoding":
        prompt = 1016 if prompt_len is None else prompt_len
        limit = 6000 if max_len is None else max_len
        candidates = 256 if size is None else size
        # Accepted lengths are the same in every size's file, so one file serves all flat replays.
        return SpeculativeReplay(
            load_speculative(64), "flat", prompt, limit, num_candidates=candidates
        )
    trees = load_reasoning(task)
    number = 0 if size is None else size
    if number >= len(trees):
        raise ValueError(f"{task} has {len(trees)} complete trees, a run asks for number {number}")
    return ReasoningReplay(trees[number], prompt_len, max_len)


def load_paper_runs(path: Path | None = None) -> list[PaperRun]:
    """The recorded runs, in file order.

    Args:
        path: another CSV; None: reference/paper_recorded_runs.csv of the shared folder.

    Raises:
        ValueError: a missing file or column, a run name that cannot be read, a cell without a
            number.
    """
    path = shared_file("reference", "paper_recorded_runs.csv") if path is None else path
    if not path.is_file():
        raise ValueError(f"no recorded runs at {path}")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: missing columns {missing}")
        return [_parse_run(path, number, row) for number, row in enumerate(reader, start=2)]


def _parse_run(path: Path, line: int, row: dict[str, str]) -> PaperRun:
    match = _RUN_NAME.fullmatch(row["run"])
    if match is None:
        raise ValueError(f"{path}, line {line}: cannot read the run name {row['run']!r}")
    size, prompt, max_len = (
        None if match[key] is None else int(match[key]) for key in ("size", "prompt", "max_len")
    )
    in_folder = _FOLDER_PROMPT.search(row["folder"])
    if prompt is None and in_folder and int(in_folder[1]) > 0:
        prompt = int(in_folder[1])
    try:
        kv, mask, steps = (int(row[key]) for key in ("KV_IO", "Mask_IO", "steps"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {line}: KV_IO, Mask_IO and steps want integers") from error
    task = match["task"].removesuffix("ToT")
    names = (row["folder"], row["run"], task, match["method"])
    return PaperRun(*names, size, prompt or None, max_len, kv, mask, steps)


@dataclass(frozen=True)
class Oracle:
    """A total that the counter must reproduce to the byte.

    Args:
        replay: which replay, in words.
        method: a paper_io method, or "flatten mask" for the bit mask.
        want, got: published bytes and ours.
    """

    replay: str
    method: str
    want: int
    got: int

    @property
    def is_exact(self) -> bool:
        """Both agree to the byte."""
        return self.want == self.got


_FEW_SHOT = {  # width: {method: bytes}; prompt 4000, 399 steps
    20: {
        "flatten": 1_673_527_296_000,
        "sequence": 17_572_036_608_000,
        "flatten mask": 817_152_000,
    },
    30: {"flatten": 2_091_909_120_000, "sequence": 26_358_054_912_000},
    50: {
        "flatten": 2_928_672_768_000,
        "sequence": 43_930_091_520_000,
        "node": 3_765_436_416_000,
    },
}
_REASONING = {  # first complete tree, prompt 1000, max length 3000
    "sorting128": {"flatten": 4_970_801_266_688, "sequence": 22_838_040_330_240},
    "docmerge": {"flatten": 5_559_063_937_024, "sequence": 21_610_823_155_712},
    "keyword": {"flatten": 505_314_541_568, "sequence": 3_786_854_105_088},
    "set128": {"flatten": 251_655_618_560, "sequence": 1_692_767_617_024},
}
_SPECULATIVE = {  # candidates: {method: bytes}; flat, prompt 1016, max length 6000
    32: {"flatten": 2_953_726_394_368},
    64: {"flatten": 2_979_009_658_880, "sequence": 187_470_926_839_808},
    128: {"flatten": 3_029_576_187_904},
    256: {"flatten": 3_130_709_245_952, "node": 23_629_811_154_944},
}


def oracles() -> Iterator[Oracle]:
    """Every exact total, with what the replays count.

    Raises:
        ValueError: the recorded workloads are not there.
    """
    for width, totals in _FEW_SHOT.items():
        replay = _replay("few_shot", width, 4000, 4400)
        yield from _compare(f"few-shot width {width}", replay, totals)
    for task, totals in _REASONING.items():
        yield from _compare(f"reasoning {task}", _replay(task, 0, 1000, 3000), totals)
    for size, totals in _SPECULATIVE.items():
        replay = _replay("speculative_decoding", size, 1016, 6000)
        yield from _compare(f"speculative flat {size}", replay, totals)


def _compare(name: str, replay: Replay, totals: dict[str, int]) -> Iterator[Oracle]:
    for method, want in totals.items():
        if method == "flatten mask":
            got = paper_mask_bytes("flatten", replay.counts, PAPER_LAYERS)
        else:
            got = paper_kv_bytes(method, replay.counts, PAPER_SHAPE, PAPER_LAYERS)
        yield Oracle(name, method, want, got)
