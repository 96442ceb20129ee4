"""IOBytes: what one attention call moves, term by term, in bytes.

`kv` counts the loads that thread blocks issue (L2 to SM, repeats included); `hbm` is what must come
from or go to DRAM. Terms are defined in docs/io.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

TERMS = ("kv", "q", "out", "partial", "mask", "index", "logits")


@dataclass(frozen=True)
class IOBytes:
    """Bytes moved by one call of one layer.

    Args:
        kv: K and V loads issued, repeats counted.
        kv_unique: K and V of each attended token once.
        q: query loads, repeats per item counted.
        out: output stores.
        partial: partial outputs and their LSE, written and read.
        mask: mask words or dense masks read.
        index: page tables and plan metadata read.
        logits: QK^T / softmax spilled to memory, write + read, by methods that do so.
        q_unique: each query row once.
    """

    kv: int = 0
    kv_unique: int = 0
    q: int = 0
    out: int = 0
    partial: int = 0
    mask: int = 0
    index: int = 0
    logits: int = 0
    q_unique: int = 0

    @property
    def total(self) -> int:
        """All traffic issued: every term but kv_unique."""
        return sum(getattr(self, name) for name in TERMS)

    def hbm(self, l2_bytes: int | None = None) -> int:
        """DRAM bytes: unique KV and q, output, partials and spills in full.

        With l2_bytes, re-reads of a KV set larger than the L2 miss in proportion to what does not
        fit: (kv - kv_unique) x (1 - l2_bytes / kv_unique).
        """
        base = self.kv_unique + (self.q_unique or self.q) + self.out + self.partial + self.logits
        if l2_bytes and self.kv_unique > l2_bytes and self.kv > self.kv_unique:
            base += int((self.kv - self.kv_unique) * (1 - l2_bytes / self.kv_unique))
        return base

    def as_columns(self, l2_bytes: int | None = None) -> dict[str, int]:
        """The row form: {kv,kv_unique,q,out,partial,mask,index,logits,total,hbm}_bytes."""
        values = asdict(self)
        values.pop("q_unique")
        values["total"] = self.total
        values["hbm"] = self.hbm(l2_bytes)
        return {f"{name}_bytes": int(value) for name, value in values.items()}

    def __add__(self, other: IOBytes) -> IOBytes:
        mine, theirs = asdict(self), asdict(other)
        return IOBytes(**{name: mine[name] + theirs[name] for name in mine})
