"""A small HSTU that scores candidates, with keys and values in blocks such as the pages of a `KvCache`.

Written from the equations of Zhai et al., "Actions Speak Louder than Words" (arXiv 2402.17152), section 3. A layer maps
the tokens X [t, d_model] to

    U, V, Q, K = split(silu(f1(norm(X))))           each [t, heads * head_dim]
    A = silu(Q K^T) / n                             pointwise instead of a softmax over the keys, for each head
    X + f2(norm(A V) * U)                           U gates what was gathered

There is no bias on A: positions are learnt vectors that are added to the tokens. Candidates are scored as the paper's
M-FALCON does: each is the next token of the history, sees all of it and itself, and no other candidate.

**Why a cached prefix changes nothing.** Keys and values of a token may be kept only if nothing that comes later moves
them. Attention is causal, so its sums stay; but the paper divides them by the length of the sequence, and that grows.
Here n is the number of keys that the token itself sees, its own included: position + 1. It is a function of the
position alone, as are the position's vector and the sums before it. So tokens [prefix, tokens) computed onto a kept
prefix come out as in one pass from the start, but for the order in which floats are added. (As `norm` follows, the
value of n matters little beyond keeping the sums in the range of small floats.)

**Where bytes are copied.** Attention reads keys and values where they lie, block by block, through views: without a
softmax the sum over all keys is the sum over the blocks, with nothing to rescale. One copy of each new token's keys and
values cannot be avoided: f1 yields U, V, Q and K of a whole batch in one product, whose rows lie side by side, while
blocks lie anywhere, so each is copied to its place. (On its way it is turned to heads first, with Q: products over rows
that lie apart take a tenth longer.) Embedding rows are copied once, by the cache's lookup, out of slots that lie
anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

silu_ = partial(functional.silu, inplace=True)

if TYPE_CHECKING:
    from cache_engine import HbmPool

Block = tuple[tuple[Tensor, Tensor], ...]
"""For each layer the keys [heads, head_dim, tokens] and the values [heads, tokens, head_dim] of a block of tokens."""


@dataclass(frozen=True)
class HstuShape:
    """The sizes of a network."""

    layers: int
    d_model: int
    heads: int
    head_dim: int
    features: int  # embedding rows of a token
    row_values: int  # floats of a row
    most_tokens: int  # of a history

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the keys and values of one token over all layers."""
        return 2 * self.layers * self.heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Request:
    """A history and the candidates to be scored after it.

    `blocks` have room for all its tokens, equally many in each but the last, and hold those of the prefix; the forward
    pass fills in the others. Requests of one batch may share blocks, as those of one user do: later ones find in them
    what earlier ones put there in the same pass.
    """

    prefix: int  # tokens that are computed already
    tokens: int  # of the whole history
    candidates: int
    blocks: Sequence[Block]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; a history without tokens has none."""
        return self.blocks[0][0][1].shape[1]

    @property
    def rows(self) -> int:
        """Tokens to compute: those after the prefix, then the candidates."""
        return self.tokens - self.prefix + self.candidates


class Hstu(nn.Module):
    """The network; `forward` takes a jagged batch. Weights are drawn from `seed`."""

    def __init__(self, shape: HstuShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.project = nn.Linear(shape.row_values, shape.d_model)
            self.position = nn.Parameter(torch.randn(shape.most_tokens + 1, shape.d_model))
            self.layers = nn.ModuleList(HstuLayer(shape) for _ in range(shape.layers))
            self.norm = nn.LayerNorm(shape.d_model)
            self.score = nn.Linear(shape.d_model, 1)
        self.requires_grad_(False).eval()

    def new_blocks(self, count: int, tokens: int) -> list[Block]:
        """Return `count` blocks of their own memory, of `tokens` tokens each."""
        dtype = self.position.dtype
        size = tokens * self.shape.kv_bytes(dtype)
        memory = torch.zeros((count, size), dtype=torch.uint8, device=self.position.device)
        return block_views(memory, self.shape, dtype)

    def request(
        self, pages: Sequence[Block], owned: Sequence[int], prefix: int, tokens: int, candidates: int
    ) -> Request:
        """Return a request on a user's pages; what they have no room for, as after a refused extension, is not kept.

        Args:
            pages: every page of the pool, from `page_blocks`.
            owned: the user's pages from the first token on, as `KvCache.pages` has them; under a lease until the
                request was served.
            prefix, tokens, candidates: see `Request`.
        """
        size = pages[0][0][1].shape[1]
        need = -(-tokens // size)
        blocks = [pages[page] for page in owned[:need]]
        if len(blocks) < need:
            blocks += self.new_blocks(need - len(blocks), size)
        return Request(prefix, tokens, candidates, blocks)

    def pool(self, rows: Tensor) -> Tensor:
        """Return the mean of each token's rows: [t * features, row_values] to [t, row_values]."""
        return rows.view(-1, self.shape.features, self.shape.row_values).mean(1)

    def forward(self, values: Tensor, requests: Sequence[Request]) -> Tensor:
        """Score the candidates of a batch, and put the keys and values of new tokens into their blocks.

        Args:
            values: [t, row_values], what `pool` gave for the tokens after each request's prefix, then its candidates:
                request i has values[offsets[i]:offsets[i + 1]], where the offsets add up its `rows`.
            requests: the batch.

        Returns:
            the scores of all candidates, request by request.
        """
        offsets = [0]
        for one in requests:
            offsets.append(offsets[-1] + one.rows)
        position = torch.cat(
            [part for one in requests for part in _positions(one, values.device)] or [torch.zeros(0, dtype=torch.int64)]
        )
        x = self.project(values) + self.position[position]
        share = (1.0 / (position + 1)).to(x.dtype).unsqueeze(1)
        for layer, compute in enumerate(self.layers):
            x = compute(x, share, layer, requests, offsets)
        last = [x[end - one.candidates : end] for one, end in zip(requests, offsets[1:], strict=True)]
        return self.score(self.norm(torch.cat(last))).squeeze(1)


class HstuLayer(nn.Module):
    """One layer; see the module."""

    def __init__(self, shape: HstuShape) -> None:
        super().__init__()
        width = shape.heads * shape.head_dim
        self.heads = shape.heads
        self.width = width
        self.norm_in = nn.LayerNorm(shape.d_model)
        self.f1 = nn.Linear(shape.d_model, 4 * width)
        self.norm_out = nn.LayerNorm(width)
        self.f2 = nn.Linear(width, shape.d_model)

    def forward(self, x: Tensor, share: Tensor, layer: int, requests: Sequence[Request], offsets: list[int]) -> Tensor:
        """Return the layer's output [t, d_model]; `share` is 1 / n of each token, [t, 1]."""
        projected = silu_(self.f1(self.norm_in(x)))
        u, qkv = projected.split((self.width, 3 * self.width), dim=1)
        v, q, k = qkv.view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3).contiguous().unbind(0)
        # Every token sees itself; beyond that, the keys before it.
        gathered = silu_((q * k).sum(2, keepdim=True)) * v
        for one, start in zip(requests, offsets, strict=False):
            _keep(one, layer, k[:, start:], v[:, start:])
        scratch = x.new_empty(max((_scores(one, self.heads) for one in requests), default=0))
        for one, start in zip(requests, offsets, strict=False):
            rows = slice(start, start + one.rows)
            _attend(one, layer, q[:, rows], gathered[:, rows], scratch)
        gathered = gathered.transpose(0, 1).reshape(len(x), self.width).mul_(share)
        return x + self.f2(self.norm_out(gathered).mul_(u))


def _positions(one: Request, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.arange(one.prefix, one.tokens, device=device),
        torch.full((one.candidates,), one.tokens, device=device),
    )


def _scores(one: Request, heads: int) -> int:
    """Return how many scores of one block a request needs room for at a time."""
    return heads * one.rows * min(one.block_tokens, one.tokens) if one.tokens else 0


def _keep(one: Request, layer: int, k: Tensor, v: Tensor) -> None:
    """Copy the keys and values of the request's new tokens, the first rows of k and v, into their blocks."""
    if one.tokens == one.prefix:
        return
    size = one.block_tokens
    for at in range(one.prefix // size, -(-one.tokens // size)):
        keys, values = one.blocks[at][layer]
        first, last = max(one.prefix, at * size), min(one.tokens, (at + 1) * size)
        within = slice(first - at * size, last - at * size)
        rows = slice(first - one.prefix, last - one.prefix)
        keys.mT[:, within] = k[:, rows]
        values[:, within] = v[:, rows]


def _attend(one: Request, layer: int, q: Tensor, gathered: Tensor, scratch: Tensor) -> None:
    """Add to `gathered` what each row of q, both [heads, rows, head_dim], sees of the history before it."""
    if one.tokens == 0:
        return
    size = one.block_tokens
    heads, rows = q.shape[:2]
    whole = one.prefix // size  # blocks that all rows see all of: most of them where most is cached, so nothing is cut
    scores = scratch[: heads * rows * size].view(heads, rows, size) if whole else scratch
    for at in range(whole):
        keys, values = one.blocks[at][layer]
        gathered.baddbmm_(silu_(torch.bmm(q, keys, out=scores)), values)
    for at in range(whole, -(-one.tokens // size)):
        keys, values = one.blocks[at][layer]
        start = at * size
        end = min(start + size, one.tokens)
        first = max(0, start - one.prefix)  # rows before it come before the block
        scores = scratch[: heads * (rows - first) * (end - start)].view(heads, rows - first, end - start)
        silu_(torch.bmm(q[:, first:], keys[:, :, : end - start], out=scores))
        new = end - max(one.prefix, start)  # of the block's tokens, those that are rows themselves
        scores[:, :new].tril_(one.prefix + first - start - 1)
        gathered[:, first:].baddbmm_(scores, values[:, : end - start])


def block_views(memory: Tensor, shape: HstuShape, dtype: torch.dtype) -> list[Block]:
    """Return memory [n, bytes], uint8, as n blocks of as many tokens as fit in each; no copy."""
    tokens = memory.shape[1] // shape.kv_bytes(dtype)
    used = memory[:, : tokens * shape.kv_bytes(dtype)].view(dtype)
    parts = used.view(memory.shape[0], shape.layers, 2, shape.heads, tokens, shape.head_dim)
    return [tuple((layer[0].mT, layer[1]) for layer in block.unbind(0)) for block in parts.unbind(0)]


def page_blocks(pool: HbmPool, shape: HstuShape, dtype: torch.dtype) -> list[Block]:
    """Return every page of a pool with payload as a block, through DLPack: no copy, on the pool's device.

    The views keep the pool's memory alive. A page's block is to be used under a lease of the page alone.
    """
    storage: Any = pool.storage
    return block_views(torch.from_dlpack(storage).view(pool.pages, pool.page_bytes), shape, dtype)
