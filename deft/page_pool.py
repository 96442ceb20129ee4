"""PagePool: which pages of a KV pool are free, and how many nodes hold each of the others.

Never-used pages lie in one range above a high-water mark; returned pages wait on a stack. A request
takes the top of the stack when that is one contiguous run, else never-used pages, else whatever is
free, sorted. So a fresh pool hands out ascending page ids, a block that is returned and taken again
stays a block, and every operation costs O(pages taken or returned), never O(pages of the pool).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deft.tree import IntArray, LongArray


class PoolFull(ValueError):
    """The pool has too few free pages for a request; nothing was changed.

    Args:
        num_needed: pages the request needs.
        num_free: pages that are free.
        num_pages: pages of the pool.
    """

    def __init__(self, num_needed: int, num_free: int, num_pages: int) -> None:
        self.num_needed = num_needed
        self.num_free = num_free
        self.num_pages = num_pages
        super().__init__(
            f"KV pool full: needed {num_needed} pages, {num_free} of {num_pages} are free; "
            "prune nodes or give the cache more pages"
        )


class PagePool:
    """Free list and reference counts of num_pages pages.

    Args:
        num_pages: pages of the pool, 1..2**31 - 1 (page tables are int32).

    Raises:
        ValueError: num_pages outside that range.
    """

    def __init__(self, num_pages: int) -> None:
        if not isinstance(num_pages, int | np.integer) or not 1 <= num_pages < 2**31:
            raise ValueError(f"num_pages must be an integer in 1..2**31 - 1, got {num_pages!r}")
        self.num_pages = int(num_pages)
        self.peak_pages = 0
        self._owners: IntArray = np.zeros(num_pages, np.int32)
        self._returned: IntArray = np.zeros(num_pages, np.int32)
        self._num_returned = 0
        self._first_unused = 0
        self._is_shuffled = False

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self.num_pages - self._first_unused + self._num_returned

    @property
    def num_used(self) -> int:
        """Pages with at least one owner."""
        return self._first_unused - self._num_returned

    def owners(self, pages: npt.NDArray[np.integer]) -> IntArray:
        """int32 [len(pages)]: how many nodes hold each page (0 = free)."""
        owners: IntArray = self._owners[pages]
        return owners

    def take(self, count: int, owners: npt.NDArray[np.integer] | None = None) -> LongArray:
        """Hand out pages.

        Args:
            count: pages wanted.
            owners: int [count], owners of each page in the order returned; None means one each.

        Returns:
            int64 [count] page ids, ascending when the pool allows.

        Raises:
            PoolFull: fewer than count pages are free; nothing was changed.
        """
        if count > self.num_free:
            raise PoolFull(count, self.num_free, self.num_pages)
        pages = self._pick(count)
        self._owners[pages] = 1 if owners is None else owners
        self.peak_pages = max(self.peak_pages, self.num_used)
        return pages

    def _pick(self, count: int) -> LongArray:
        begin = self._num_returned - count
        if begin >= 0:
            top = self._returned[begin : self._num_returned][::-1].astype(np.int64)
            if self._is_shuffled or (np.diff(top) == 1).all():
                self._num_returned = begin
                return top
        num_unused = min(count, self.num_pages - self._first_unused)
        begin = self._num_returned - (count - num_unused)
        top = np.sort(self._returned[begin : self._num_returned]).astype(np.int64)
        unused = np.arange(self._first_unused, self._first_unused + num_unused, dtype=np.int64)
        self._num_returned = begin
        self._first_unused += num_unused
        return np.concatenate([top, unused])

    def release(self, pages: npt.NDArray[np.integer]) -> LongArray:
        """Take one owner off each page for every time it is listed; pages without owners are free.

        Returns:
            int64, ascending: the pages that became free.

        Raises:
            RuntimeError: a page has fewer owners than times it is listed (a double free).
        """
        counted, times = np.unique(pages, return_counts=True)
        left = self._owners[counted] - times
        if counted.size and left.min() < 0:
            page = int(counted[left < 0][0])
            raise RuntimeError(
                f"page {page} has {self._owners[page]} owners and was freed more often"
            )
        self._owners[counted] = left
        freed: LongArray = counted[left == 0].astype(np.int64)
        # Top of the stack first in ascending order: the next taker gets the block as it was.
        self._returned[self._num_returned : self._num_returned + len(freed)] = freed[::-1]
        self._num_returned += len(freed)
        if self.num_used == 0 and not self._is_shuffled:
            self._num_returned = self._first_unused = 0
        return freed

    def check_room(self, count: int, released: npt.NDArray[np.integer]) -> None:
        """See whether count pages could be taken once the listed pages are released.

        Raises:
            PoolFull: they could not.
        """
        if count <= self.num_free:
            return
        counted, times = np.unique(released, return_counts=True)
        num_free = self.num_free + int((self._owners[counted] == times).sum())
        if count > num_free:
            raise PoolFull(count, num_free, self.num_pages)

    def shuffle(self, seed: int) -> None:
        """Put all free pages on the stack in random order; from now on they leave as they lie."""
        unused = np.arange(self._first_unused, self.num_pages, dtype=np.int32)
        free = np.concatenate([self._returned[: self._num_returned], unused])
        self._returned[: len(free)] = np.random.default_rng(seed).permutation(free)
        self._num_returned = len(free)
        self._first_unused = self.num_pages
        self._is_shuffled = True
