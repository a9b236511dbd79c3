"""Whose computed blocks a sequence may use again: a hash chain by content and owner, never names.

The chain's root says whose it is: the tenant's secret, the client's salt, the base, the adapter and
the KV dtype, each by content. Every further link is the hash of one full block of tokens.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence as Ordered

from manylora.engine.blocks import BlockPool
from manylora.engine.sequence import Sequence

HASH_FORMAT = b"manylora-kv-2"


def tenant_secret(engine_secret: bytes, tenant: str) -> bytes:
    """HMAC-SHA-256: nobody without the engine's secret can name a tenant's blocks."""
    return hmac.digest(engine_secret, tenant.encode(), "sha256")


def chain_root(
    *,
    owner: bytes | None,
    salt: str | None,
    base_digest: str,
    adapter_digest: str | None,
    kv_dtype: str,
) -> bytes:
    """SHA-256 over a length-prefixed, tagged tuple: unequal tuples have unequal bytes.

    Args:
        owner: a tenant's secret; None for what the operator lets all tenants share.
    """
    parts = (
        *(("tenant", owner) if owner is not None else ("shared",)),
        *(("salt", salt) if salt is not None else ("no salt",)),
        *("model", base_digest),
        *(("adapter", adapter_digest) if adapter_digest is not None else ("base",)),
        *("kv", kv_dtype),
    )
    state = hashlib.sha256(HASH_FORMAT)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        state.update(len(content).to_bytes(8, "little"))
        state.update(content)
    return state.digest()


def chain_next(parent: bytes, token_ids: Ordered[int]) -> bytes:
    """The hash of a full block after the block (or root) with hash `parent`."""
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.sha256(parent + tokens).digest()


class PrefixCache:
    """Finds a sequence's prefix among the pool's cached blocks, and lets its own be found."""

    def __init__(
        self,
        blocks: BlockPool,
        *,
        base_digest: str,
        kv_dtype: str,
        secret: bytes,
        share_base_prefixes: bool,
    ) -> None:
        """
        Args:
            secret: the engine's, from which each tenant's is made.
            share_base_prefixes: one chain for all tenants on the base model: one may then tell by
                the time that another has sent the same prompt.
        """
        self._blocks = blocks
        self._base_digest = base_digest
        self._kv_dtype = kv_dtype
        self._secret = secret
        self._share_base_prefixes = share_base_prefixes

    def find(self, sequence: Sequence) -> list[int]:
        """Cached blocks of its prefix; the last token is always left to compute.

        None while prompt log-probabilities are wanted: blocks keep no logits.
        """
        if not self._blocks.prefix_caching or sequence.lacks_prompt_logprobs:
            return []
        full = (sequence.num_tokens - 1) // self._blocks.block_size
        return self._blocks.find_prefix(self.hashes(sequence, full)[:full])

    def remember(self, sequence: Sequence, first_token: int) -> None:
        """Let the blocks be found that are full since `first_token` was the next to compute."""
        if not self._blocks.prefix_caching:
            return
        size = self._blocks.block_size
        full = sequence.num_computed_tokens // size
        if full == first_token // size:
            return
        hashes = self.hashes(sequence, full)
        for index in range(first_token // size, full):
            self._blocks.remember(
                sequence.block_table[index], hashes[index], sequence.request.tenant
            )

    def forget(self, sequence: Sequence) -> None:
        """Let no other sequence find the blocks of one whose numbers went wrong."""
        for block in sequence.block_table:
            self._blocks.forget(block)

    def hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """The hashes of its first `count` full blocks at least."""
        size, hashes = self._blocks.block_size, sequence.block_hashes
        while len(hashes) < count:
            parent = hashes[-1] if hashes else self._root(sequence)
            start = len(hashes) * size
            hashes.append(chain_next(parent, sequence.token_ids[start : start + size]))
        return hashes

    def _root(self, sequence: Sequence) -> bytes:
        request = sequence.request
        shared = self._share_base_prefixes and request.adapter is None
        return chain_root(
            owner=None if shared else tenant_secret(self._secret, request.tenant),
            salt=request.cache_salt,
            base_digest=self._base_digest,
            adapter_digest=sequence.digest,
            kv_dtype=self._kv_dtype,
        )
