"""Keys and values of past prompts, kept in pages so that the next call computes only what is new.

Used by `torch_engine`: rollouts of a group share their prompt, and every turn extends the last one's history. A page
holds `page_size` tokens and is found by (page before it, its token ids), which is a radix tree with fixed-size edges:
exact, without splits. Invariant: all pages were computed under the weights in use; the engine calls `clear` at every
weight update.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from clawgym_env.engine.base import TokenIds

_Key = tuple[int, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class _Page:
    id: int
    kv: Tensor
    """[2, layers, kv_heads, page_size, head_dim]."""


class PrefixCache:
    """A least-recently-used cache of pages under a byte budget."""

    def __init__(self, *, max_bytes: int, bytes_per_token: int, page_size: int = 32) -> None:
        self.page_size = page_size
        self._max_pages = max_bytes // (bytes_per_token * page_size)
        self._pages: OrderedDict[_Key, _Page] = OrderedDict()
        self._next_id = 1

    def __len__(self) -> int:
        """Number of cached tokens."""
        return len(self._pages) * self.page_size

    def match(self, token_ids: TokenIds) -> list[Tensor]:
        """Return the keys and values of the leading tokens that are cached, one tensor per page of `page_size`."""
        keys: list[_Key] = []
        pages: list[Tensor] = []
        parent = 0
        for start in range(0, len(token_ids) - self.page_size + 1, self.page_size):
            key = (parent, token_ids[start : start + self.page_size].tobytes())
            page = self._pages.get(key)
            if page is None:
                break
            keys.append(key)
            pages.append(page.kv)
            parent = page.id
        self._touch(keys)
        return pages

    def insert(self, token_ids: TokenIds, read: Callable[[int, int], Tensor]) -> None:
        """Keep the whole pages of a sequence; `read(start, stop)` gives their keys and values."""
        keys: list[_Key] = []
        parent = 0
        stop = min(len(token_ids) // self.page_size, self._max_pages) * self.page_size
        for start in range(0, stop, self.page_size):
            key = (parent, token_ids[start : start + self.page_size].tobytes())
            page = self._pages.get(key)
            if page is None:
                page = _Page(self._next_id, read(start, start + self.page_size).clone())
                self._next_id += 1
                self._pages[key] = page
            keys.append(key)
            parent = page.id
        self._touch(keys)
        while len(self._pages) > self._max_pages:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()

    def _touch(self, keys: list[_Key]) -> None:
        # Leaf first, root last: a page is always evicted before the page it hangs on.
        for key in reversed(keys):
            self._pages.move_to_end(key)
