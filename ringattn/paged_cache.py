"""This module contains a paged cache of several sequences on one rank (Kwon et al. 2023, PagedAttention).

Row i of a sequence is row i % page_size of a page. Column i // page_size of the page table contains the number of this page:

    page table                      pool of pages
    sequence 0    7  2  -           page 2: rows 64 to 127 of sequence 0
    sequence 1    0  -  -           page 7: rows 0 to 63 of sequence 0
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.validation import as_integer, check_dense, check_fit, check_new_tokens, check_rows, shown
from ringattn.spec import autocast

PAGE_UNIT = 64  # each tile of keys in a kernel must lie within one page


class PagedKVCache:
    """A `PagedKVCache` holds the keys and values of several growing sequences, one sequence per batch entry.

    In a CUDA graph, pass `rows` to `append`. Before each replay, call `reserve`, which adds pages for the new tokens to the
    page table in place:

        rows = torch.tensor(cache.lengths, device="cuda")[:, None]  # the position of the next token of each sequence
        with torch.cuda.graph(graph):
            hi = (rows + 1).int()
            cache.append(k, v, rows=rows)
            out = decode_attention(q, cache, bounds=(torch.zeros_like(hi), hi))
            rows += 1
        cache.reserve([length + 1 for length in cache.lengths])
        graph.replay()

    A token whose page is not reserved is lost without an error.

    Attributes:
        lengths: the number of tokens of each sequence, without tokens that graphs appended.
        free_pages: the number of unused pages.
        page_table: int32 (batch, pages per sequence), on the cache's device; None before the first `append`.
    """

    rank, ranks = 0, 1

    def __init__(self, pages: int, batch: int, capacity: int, page_size: int = PAGE_UNIT) -> None:
        """Create an empty cache.

        Args:
            pages: the number of pages of all sequences together.
            batch: the number of sequences.
            capacity: the maximum number of tokens per sequence.
            page_size: the number of tokens per page, a multiple of 64.

        Raises:
            ValueError: an argument is invalid.
        """
        pages, batch = as_integer("pages", pages, 1), as_integer("batch", batch, 1)
        capacity, page_size = as_integer("capacity", capacity, 1), as_integer("page_size", page_size, 1)
        if page_size % PAGE_UNIT:
            raise ValueError(f"page_size={page_size}: it must be a multiple of {PAGE_UNIT}")
        self.pages, self.capacity, self.page_size = pages, capacity, page_size
        self.lengths = [0] * batch
        self.page_table: Tensor | None = None
        self.free_pages = pages
        self._num_pages = [0] * batch  # the number of pages of each sequence
        with torch.inference_mode(False):  # inference tensors could not be modified outside of inference mode
            self._free = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device="cpu")  # the first `free_pages` are free
            # Unused cells of the page table refer to an extra page, which receives tokens without a reserved page.
            self._table = torch.full((batch, -(-capacity // page_size)), pages, dtype=torch.int32, device="cpu")
        self._k: Tensor | None = None  # None until the cache has memory
        self._v = self._table
        self._checked: tuple[Any, ...] = ()  # as in `KVCache`
        self._decode: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_checked": (), "_decode": None}

    def append(self, k: Tensor, v: Tensor, *, entry: int | None = None, rows: Tensor | None = None) -> None:
        """Add the next tokens of all sequences, or of one sequence, without gradients.

        Args:
            k: (B, N, Hkv, D), v: (B, N, Hkv, Dv): the next N tokens of each sequence that grows.
            entry: the index of the only sequence that grows, for B = 1; None if all sequences grow.
            rows: the rows that receive the tokens: int64 (N,) or (B, N), on the cache's device. Each row must be below the
                capacity. With `rows`, the call does not wait for the GPU and does not change `lengths`.

        Raises:
            ValueError: too few pages are free, the tokens exceed the capacity, or their shape or dtype has changed.
        """
        check_dense(k, k, v)
        k, v = autocast(k, v)
        check_fit(k, k, v)
        k, v, num_tokens = k.detach(), v.detach(), k.shape[1]
        if rows is not None:
            self._write(k, v, rows, entry)
            return
        self._check_batch(k, v, entry)
        entries = range(len(self.lengths)) if entry is None else [self._index(entry)]
        self._reserve({i: self.lengths[i] + num_tokens for i in entries})
        self._allocate(k, v)
        first = torch.tensor([self.lengths[i] for i in entries], device="cpu")
        self._store(k, v, self._flat_rows(self._table[list(entries)], first[:, None] + torch.arange(num_tokens, device="cpu")))
        for i in entries:
            self.lengths[i] += num_tokens

    def reserve(self, lengths: list[int]) -> None:
        """Reserve pages for the given lengths, so that replays of a CUDA graph can append tokens.

        Raises:
            ValueError: too few pages are free, or a length exceeds the capacity. An error leaves the cache unchanged.
        """
        lengths = lengths.tolist() if hasattr(lengths, "tolist") else lengths
        if not isinstance(lengths, Sequence) or len(lengths) != len(self.lengths):
            raise ValueError(f"lengths={shown(lengths)}: it must be a list of {len(self.lengths)} lengths, one per sequence")
        self._reserve({i: as_integer("a length", length) for i, length in enumerate(lengths)})

    def truncate(self, entry: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence, and return unused pages. Truncate to length 0 before a new sequence
        begins.
        """
        entry = self._index(entry)
        length = as_integer("length", length, high=self.lengths[entry], remedy=", the tokens of the sequence")
        kept, before = -(-length // self.page_size), self._num_pages[entry]
        self.lengths[entry] = length
        removed = self._table[entry, kept:before]
        self._free[self.free_pages : self.free_pages + len(removed)] = removed.flip(0)
        self.free_pages += len(removed)
        self._num_pages[entry] = kept
        self._set_pages([(entry, column, self.pages) for column in range(kept, before)])

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (pages + 1, page size, Hkv, D or Dv), and the page table."""
        if self._k is None or self.page_table is None:
            raise ValueError("the cache is empty: call append first")
        return self._k, self._v, self.page_table

    def _index(self, entry: int) -> int:
        return as_integer("entry", entry, high=len(self.lengths) - 1, remedy=", the index of a sequence")

    def _check_batch(self, k: Tensor, v: Tensor, entry: int | None) -> None:
        batch = len(self.lengths) if entry is None else 1
        if k.shape[0] != batch:
            raise ValueError(f"k has {k.shape[0]} batch entries: it must have {batch}, one for each sequence that grows")
        if self._k is not None:
            check_new_tokens((k, v), (self._k, self._v), batch)

    def _reserve(self, lengths: dict[int, int]) -> None:
        longest = max(lengths.values(), default=0)
        if longest > self.capacity:
            raise ValueError(f"{longest} tokens exceed the capacity {self.capacity} of a sequence: create a larger cache")
        missing = [
            (entry, column)
            for entry, length in lengths.items()
            for column in range(self._num_pages[entry], -(-length // self.page_size))
        ]
        if len(missing) > self.free_pages:
            raise ValueError(
                f"the sequences need {len(missing)} more pages, but only {self.free_pages} of {self.pages} pages are free: "
                "truncate finished sequences, or create a cache with more pages"
            )
        if missing:
            taken = self._free[self.free_pages - len(missing) : self.free_pages].flip(0).tolist()
            self.free_pages -= len(missing)
            for entry, _ in missing:
                self._num_pages[entry] += 1
            self._set_pages([(*cell, page) for cell, page in zip(missing, taken, strict=True)])

    def _set_pages(self, cells: list[tuple[int, int, int]]) -> None:
        if not cells:
            return
        entries, columns, pages = torch.tensor(cells, device="cpu").unbind(1)
        self._table[entries, columns] = pages.int()
        if self.page_table is not None:
            update = torch.stack((entries * self._table.shape[1] + columns, pages)).to(self.page_table.device)
            self.page_table.view(-1).index_copy_(0, update[0], update[1].int())

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        if self._k is None:
            with torch.inference_mode(False):
                self._k, self._v = (x.new_zeros(self.pages + 1, self.page_size, *x.shape[2:]) for x in (k, v))
                self.page_table = self._table.to(k.device, copy=True)

    def _write(self, k: Tensor, v: Tensor, rows: Tensor, entry: int | None) -> None:
        if self._k is None or entry is not None:
            raise ValueError("rows requires entry=None and a cache that holds tokens: call append without rows first")
        self._check_batch(k, v, None)
        check_rows(rows, k, self.capacity)
        self._store(k, v, self._flat_rows(self.operands[2], rows.expand(k.shape[:2])))

    def _flat_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        pages = table.gather(1, rows // self.page_size).long()
        return (pages * self.page_size + rows % self.page_size).flatten()

    def _store(self, k: Tensor, v: Tensor, rows: Tensor) -> None:
        rows = rows.to(k.device)
        for new, stored in zip((k, v), self.operands[:2], strict=True):
            stored.flatten(0, 1).index_copy_(0, rows, new.flatten(0, 1))
