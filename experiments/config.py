"""The configuration of a job: schema dataclasses that refuse misspelt keys, and how to compose it.

conf/ holds the values. `kernel` and `model` are lists of choices whose files start with
`# @package kernel.NAME` / `# @package model.NAME`, so that several live side by side in one job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf

from deft.shape import HeadShape
from experiments.command_line import one_line
from experiments.variants import ConfigError as ConfigError
from experiments.variants import expand_variants, kernel_id
from experiments.workload import Workload
from experiments.workloads import families, workload_of

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
TIMERS = ("graph", "eager", "cpu")
DEVICES = ("auto", "cpu", "cuda")
MAX_TIMEOUT_S = 1e8  # three years: what setitimer takes everywhere


@dataclass
class ModelConfig:
    """Attention heads of a model; `source` says where the figures are from."""

    num_qo_heads: int = MISSING
    num_kv_heads: int = MISSING
    head_dim: int = MISSING
    num_layers: int = 1
    source: str = ""


@dataclass
class TimingConfig:
    """How a kernel is timed.

    Args:
        timer: "graph" (CUDA-graph replays), "eager" (plain launches); on a CPU always "cpu".
        cold_l2: empty the L2 before each sample, outside the timed region.
        repeats: most samples; on a GPU at least 20 are taken whatever it says.
        warmup: runs before the first sample.
        plan_repeats: samples of plan().
        budget_s: seconds of host time after which fewer samples (3, on a GPU 20) will do.
    """

    timer: str = "graph"
    cold_l2: bool = True
    repeats: int = 30
    warmup: int = 3
    plan_repeats: int = 5
    budget_s: float = 1.0


@dataclass
class BenchConfig:
    """One job of the benchmark; conf/bench.yaml explains each value."""

    kernel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, ModelConfig] = field(default_factory=dict)
    workload: Any = MISSING
    timing: TimingConfig = field(default_factory=TimingConfig)
    variants: dict[str, Any] = field(default_factory=dict)
    name: str = "adhoc"
    dtype: Any = "float16"
    page_size: Any = 1
    seed: int = 0
    device: str = "auto"
    device_model: str = "h200"
    measure_max_flops: float = 1e9
    measure_max_tokens: int = 8192
    kernel_timeout_s: float = 120.0
    results_dir: str = "results"
    baseline: str = "flash_decoding"
    resume: bool = False
    dry_run: bool = False
    dump_tree: bool = False
    figures: bool = True
    walkthrough: bool = False


def register_schemas() -> None:
    """Tell Hydra the schemas that conf/*.yaml build on."""
    store = ConfigStore.instance()
    store.store(name="bench_schema", node=BenchConfig)
    for name, kind in families().items():
        store.store(group="schema/workload", name=name, node=kind)


register_schemas()


@dataclass(frozen=True)
class Job:
    """A checked configuration in plain Python values.

    Args:
        kernels: entry -> its configuration, `_target_` included. An entry is a kernel id, or for a
            variant the id, a space and its knobs (experiments/variants.py).
        models: model name -> heads.
        workload: the trees.
        settings: everything else.
        overrides: what was given on the command line.
    """

    kernels: dict[str, dict[str, Any]]
    models: dict[str, ModelConfig]
    workload: Workload
    settings: BenchConfig
    overrides: tuple[str, ...] = ()

    @property
    def timing(self) -> TimingConfig:
        """Timer settings."""
        return self.settings.timing

    @property
    def dtypes(self) -> list[str]:
        """Dtype names, in order."""
        return [str(dtype) for dtype in _as_list(self.settings.dtype)]

    @property
    def page_sizes(self) -> list[int]:
        """Tokens per page, in order."""
        return _as_list(self.settings.page_size)

    def shape(self, model: str, dtype: str) -> HeadShape:
        """Heads of one of the models.

        Raises:
            ValueError: a layout or dtype that no kernel of this project can run.
        """
        heads = self.models[model]
        return HeadShape(heads.num_qo_heads, heads.num_kv_heads, heads.head_dim, dtype)

    def make_kernel(self, name: str) -> Any:
        """A fresh kernel of an entry, named as its YAML file.

        Raises:
            ConfigError: the configuration names no class or options that it refuses.
        """
        try:
            kernel = instantiate(self.kernels[name], _convert_="all")
            kernel.name = kernel_id(name)
        except SystemExit as error:
            raise ConfigError(f"kernel {name}: calls sys.exit when it is made") from error
        except Exception as error:
            raise ConfigError(f"kernel {name}: {one_line(error.__cause__ or error)}") from error
        return kernel


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check(settings: BenchConfig) -> None:
    timing = settings.timing
    if timing.timer not in TIMERS:
        raise ConfigError(f"timing.timer must be one of {TIMERS}, got {timing.timer!r}")
    if settings.device not in DEVICES:
        raise ConfigError(f"device must be one of {DEVICES}, got {settings.device!r}")
    if timing.repeats < 1 or timing.warmup < 0 or timing.plan_repeats < 1:
        raise ConfigError("timing wants repeats >= 1, warmup >= 0 and plan_repeats >= 1")
    for size in _as_list(settings.page_size):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 128:
            raise ConfigError(f"page_size must be a whole number in 1..128, got {size!r}")
    if not settings.model:
        raise ConfigError("no model chosen; for example model=llama3_8b")


def _check_settings(settings: BenchConfig) -> None:
    for name in ("dtype", "page_size"):
        if not _as_list(getattr(settings, name)):
            raise ConfigError(f"{name} is an empty list; give at least one value")
    if not -(2**63) <= settings.seed < 2**63:
        raise ConfigError(f"seed must fit in 64 bits, got {settings.seed}")
    if not settings.kernel_timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"kernel_timeout_s must be at most {MAX_TIMEOUT_S:g} seconds (0 is no limit), "
            f"got {settings.kernel_timeout_s}"
        )
    if math.isnan(settings.measure_max_flops):
        raise ConfigError("measure_max_flops must be a number, got nan")
    folder = Path(settings.name)
    if not folder.parts or folder.is_absolute() or ".." in folder.parts:
        raise ConfigError(f"name must name a folder inside results_dir, got {settings.name!r}")
    if settings.baseline not in {*kernel_names(), *settings.kernel}:
        raise ConfigError(
            f"baseline {settings.baseline!r} is no kernel; there are {kernel_names()}"
        )


def _chosen_kernels(settings: BenchConfig) -> dict[str, dict[str, Any]]:
    """Kernels with a class; a preset's knobs of one that kernel=[...] left out come without."""
    for name, conf in settings.kernel.items():
        if not isinstance(conf, dict) or not ("_target_" in conf or name in kernel_names()):
            raise ConfigError(
                f"unknown kernel {name!r}: kernel.{name} has no _target_ and there is no "
                f"conf/kernel/{name}.yaml"
            )
    kernels = {name: conf for name, conf in settings.kernel.items() if "_target_" in conf}
    if not kernels:
        raise ConfigError(f"no kernel chosen; kernel=[...] takes {kernel_names()}")
    known = {*kernel_names(), *settings.kernel}
    kernels.update(expand_variants(settings.variants, kernels, known))
    return kernels


def _strict(kind: Any, values: dict[str, Any], where: str) -> Any:
    """A config dataclass from its values, refusing keys that were added with +."""
    known = [parameter.name for parameter in fields(kind)]
    if unknown := sorted(set(values) - set(known)):
        raise ConfigError(f"{where} has no key {unknown}; it has {sorted(known)}")
    return kind(**values)


def job_of(cfg: DictConfig, overrides: Sequence[str] = ()) -> Job:
    """A Job from a composed configuration.

    Raises:
        ConfigError, ValueError: a value that cannot be run.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    models = {
        name: _strict(ModelConfig, heads, f"model.{name}") for name, heads in plain["model"].items()
    }
    workload = workload_of(plain["workload"])
    timing = _strict(TimingConfig, plain["timing"], "timing")
    values = {**plain, "model": models, "workload": workload, "timing": timing}
    settings = _strict(BenchConfig, values, "the configuration")
    _check(settings)
    _check_settings(settings)
    job = Job(_chosen_kernels(settings), models, workload, settings, tuple(overrides))
    for name in models:
        for dtype in job.dtypes:
            job.shape(name, dtype)
    for name in job.kernels:
        job.make_kernel(name)
    return job


def kernel_names() -> list[str]:
    """Every kernel id that conf/kernel/ has."""
    return sorted(path.stem for path in (CONF_DIR / "kernel").glob("*.yaml"))


def compose_job(overrides: Sequence[str]) -> Job:
    """The job that `python -m experiments.bench <overrides>` would run.

    Raises:
        ValueError: what the command line would refuse, with the same message.
    """
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            cfg = compose("bench", overrides=list(overrides))
    except HydraException as error:
        raise ConfigError(one_line(error)) from error
    return job_of(cfg, overrides)


def timing_key(job: Job) -> dict[str, Any]:
    """What must agree, beside the point and the kernel, for a stored row to count as this one."""
    settings = job.settings
    limits = {"max_flops": settings.measure_max_flops, "max_tokens": settings.measure_max_tokens}
    return {**asdict(job.timing), **limits, "seed": settings.seed}
