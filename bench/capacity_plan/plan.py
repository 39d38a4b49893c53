"""Bytes and times of a shape under a preset on a host, and what limits them.

Sizes are exact where the service's are (docs/design.md, Memory). Times are sums of what each resource takes for a step or a
prompt: with one session worker, link and stores take turns in a layer; with several and a device of its own, two micro-batches
overlap them and the slowest decides.
"""

import dataclasses

from capacity_plan import shapes

MAX_SESSIONS = 1024  # records of a store
MOST_TOKENS = 1 << 31


@dataclasses.dataclass(frozen=True)
class Terms:
    """How the service is set."""

    rows: str = "f16"
    exact_tokens: int = shapes.EXACT_TOKENS
    prefill_chunk: int = shapes.PREFILL_CHUNK
    max_batch: int = shapes.MAX_BATCH
    kept: str = "power"


class Plan:
    def __init__(self, shape, preset, host, terms=Terms()):
        self.shape, self.preset, self.host, self.terms = shape, preset, host, terms

    # ---- bytes ----

    def base_bytes(self):
        """On the device whatever the sessions: weights, tables, scratch of a step."""
        terms = self.terms
        return (self.shape.weight_bytes + self.preset.table_bytes(self.shape) +
                self.shape.scratch_bytes(terms.prefill_chunk, terms.max_batch, terms.rows))

    def session_bytes(self, n_tokens):
        """On the device for a session that runs with n_tokens."""
        return (self.shape.exact_bytes(n_tokens, self.terms.rows, self.terms.exact_tokens) +
                self.preset.key_bytes(self.shape, n_tokens, self.terms.exact_tokens))

    def selection_bytes(self, n_tokens):
        """While a row of n_tokens is selected: scores of a layer's old tokens in f32, masses and masks of their blocks."""
        old = shapes.old_tokens(n_tokens, self.terms.exact_tokens)
        blocks = shapes.old_blocks(n_tokens, self.terms.exact_tokens)
        if self.preset.name == "full":
            return blocks * 8 * self.shape.n_kv_heads
        return old * 4 * self.shape.n_heads + blocks * (8 * self.shape.n_kv_heads + 4 * self.shape.n_heads)

    def host_bytes(self, n_tokens, rows=None):
        return self.shape.host_bytes(n_tokens, rows or self.terms.rows)

    def lanes_share(self):
        """Of a session's blocks that the fullest store has: lanes are whole."""
        return -(-shapes.N_LANES // self.host.n_nodes) / shapes.N_LANES

    def _fits_device(self, n_tokens, n_sessions=1):
        host = self.host
        if not host.has_device:
            return True  # it shares the nodes' memory
        needed = self.base_bytes() + n_sessions * self.session_bytes(n_tokens) + self.selection_bytes(n_tokens)
        return needed <= host.device_bytes - host.device_reserve

    def _fits_host(self, n_tokens, n_sessions=1):
        host = self.host
        room = host.node_bytes * host.node_share
        if not host.has_device:
            room -= (self.base_bytes() + n_sessions * self.session_bytes(n_tokens) + self.selection_bytes(n_tokens)) / host.n_nodes
        return n_sessions * self.host_bytes(n_tokens) * self.lanes_share() <= room

    @staticmethod
    def _most(fits, most):
        """The largest n up to most with fits(n), which holds for all below it too; 0: none."""
        if fits(most):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def longest(self):
        """(tokens by the device, tokens by the stores, the smaller, what limits it); None: that does not limit it."""
        # Counted in blocks, less the token that reserves one more; above the exact tokens bytes grow with every block.
        def tokens(fits):
            n = self._most(lambda blocks: fits(blocks * shapes.BLOCK_TOKENS - 1), MOST_TOKENS // shapes.BLOCK_TOKENS)
            return n * shapes.BLOCK_TOKENS - 1 if n else 0
        device, host = tokens(self._fits_device), tokens(self._fits_host)
        device = None if device >= MOST_TOKENS - 1 else device
        host = None if host >= MOST_TOKENS - 1 else host
        found = [(n, name) for n, name in ((device, "device memory"), (host, "host memory")) if n is not None]
        least, limit = min(found) if found else (MOST_TOKENS - 1, "32-bit token numbers")
        return device, host, least, limit

    def sessions(self, n_tokens):
        """(that run at once, what limits them, that the stores hold)"""
        held = self._most(lambda n: self._fits_host(n_tokens, n), MAX_SESSIONS)
        running = self._most(lambda n: self._fits_device(n_tokens, n), MAX_SESSIONS)
        limits = [(held, "host memory" if held < MAX_SESSIONS else "session records"), (running, "device memory")]
        least, limit = min(limits, key=lambda pair: pair[0])
        return least, limit, held

    # ---- times ----

    def read_bytes(self, n_tokens):
        """(rows, block sums) that the stores read for a token of a session with n_tokens."""
        old = shapes.old_tokens(n_tokens, self.terms.exact_tokens)
        rows = self.preset.kept(n_tokens, self.terms.kept) * old * self.shape.token_bytes(self.terms.rows)
        sums = 0
        if self.preset.name != "full":  # what is not read is estimated from the sums of V
            sums = shapes.old_blocks(n_tokens, self.terms.exact_tokens) * self.shape.n_layers * self.shape.n_kv_heads * \
                self.shape.head_dim * 4
        return rows, sums

    def link_bytes(self, n_tokens):
        """(to the stores, back) for a token, all layers: gpu-worker/step_request.c"""
        shape, blocks = self.shape, shapes.old_blocks(n_tokens, self.terms.exact_tokens)
        stores = self.host.n_nodes
        there = shape.n_kv_heads * shape.row_bytes(self.terms.rows) + 40
        back = 0
        if blocks:
            masses = 0 if self.preset.name == "full" else shape.n_heads * (blocks + stores) * 4
            there += masses + blocks * 8 * (shape.n_kv_heads + 1)
            there += stores * (shape.n_heads * shape.head_dim * 4 + shape.n_kv_heads * 64 + 64)
            back = shape.n_heads * min(shapes.N_LANES, blocks) * (shape.head_dim + 2) * 4
        return there * shape.n_layers, back * shape.n_layers

    def step_terms(self, n_tokens, n_sessions=1):
        """Seconds of a decode step of n_sessions, by resource."""
        host, shape = self.host, self.shape
        exact = self.shape.exact_bytes(n_tokens, self.terms.rows, self.terms.exact_tokens)
        old = shapes.old_tokens(n_tokens, self.terms.exact_tokens)
        weights = shape.step_bytes / host.device_rate
        products = 2 * n_sessions * shape.params / host.arithmetic
        rows, sums = self.read_bytes(n_tokens)
        terms = {
            "device memory rate": (weights + n_sessions * exact / host.device_rate) if weights >= products else 0.0,
            "device arithmetic": products if products > weights else 0.0,
            "key scan": n_sessions * old * self.preset.key_token_bytes(shape) / host.key_rate,
            "store memory rate": n_sessions * (rows + sums) * self.lanes_share() / host.node_rate,
            "link rate": n_sessions * sum(self.link_bytes(n_tokens)) / host.link_rate if host.link_rate else 0.0,
            "round trips": shape.n_layers * host.layer_s if old else 0.0,
            "step": host.step_s,
        }
        if not terms["device memory rate"]:
            terms["key scan"] += n_sessions * exact / host.device_rate
        return terms

    def rate(self, n_tokens, n_sessions=1):
        """(tokens per second of all sessions together, what takes longest)"""
        terms = self.step_terms(n_tokens, n_sessions)
        step = sum(terms.values())
        if n_sessions > 1 and self.host.has_device:
            at_work = {"device": ("device memory rate", "device arithmetic", "key scan"),
                       "link": ("link rate", "round trips"), "stores": ("store memory rate",)}
            busy = {who: sum(terms[name] for name in names) for who, names in at_work.items()}
            slowest = max(busy, key=busy.get)
            terms = {name: terms[name] for name in at_work[slowest]}
            step = busy[slowest] + self.host.step_s
        return n_sessions / step, max(terms, key=terms.get)

    def prefill_terms(self, n_tokens):
        """Seconds until the first token of a prompt of n_tokens in an empty service, by resource."""
        host, shape, terms = self.host, self.shape, self.terms
        chunks = -(-n_tokens // terms.prefill_chunk)
        pairs = n_tokens * (n_tokens + 1) / 2
        # Each chunk's attention goes over the rows of all chunks before it, in the stores' memory.
        earlier = terms.prefill_chunk * chunks * (chunks - 1) / 2 * shape.token_bytes(terms.rows)
        own = n_tokens * shape.token_bytes(terms.rows)
        products = 2 * (n_tokens * shape.layer_params + shape.n_vocab * shape.n_embd)
        result = {
            "arithmetic": products / host.arithmetic,
            "attention arithmetic": 4 * pairs * shape.n_layers * shape.n_heads * shape.head_dim / host.attention,
            "steps": chunks * host.step_s,
        }
        if host.has_device:
            result["weights"] = max(0.0, chunks * shape.step_bytes / host.device_rate - result["arithmetic"])
            result["link rate"] = (earlier + own) / host.link_rate
            result["store memory rate"] = max(0.0, (earlier + own) * self.lanes_share() / host.node_rate - result["link rate"])
        return result

    def first_token(self, n_tokens):
        """(seconds, what takes longest)"""
        terms = self.prefill_terms(n_tokens)
        return sum(terms.values()), max(terms, key=terms.get)
