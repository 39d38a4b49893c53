"""Shapes of models: those that are built in, of a GGUF file's header, or of options; and what a preset keeps of a token.

Sizes follow proto/layout.h (rows, blocks), gpu-worker/session.c (exact set), gpu-worker/keys (tiles) and gpu-worker/step.c
(scratch); the tests and 'bench/capacity --check' hold them against the service.
"""

import dataclasses
import math
import struct

BLOCK_TOKENS = 64
N_LANES = 12
N_SINKS = 4
WINDOW_BLOCKS = 2
CHUNK_BLOCKS = 16  # of the key cache
PAGE_BYTES = 4096
EXACT_TOKENS = 1024
PREFILL_CHUNK = 256
MAX_BATCH = 16

# Bytes of 32 weights (256 for the k-quants, here as 32) by the name of the GGUF type.
WEIGHT_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q6_k": 6.5625, "q5_k": 5.5, "q5_1": 6.0, "q5_0": 5.5,
               "q4_k": 4.5, "q4_1": 5.0, "q4_0": 4.5}
# GGUF's number of a tensor type -> (numbers a block, bytes a block)
TENSOR_TYPES = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 12: (256, 144),
                13: (256, 176), 14: (256, 210), 30: (1, 2)}


class ShapeError(Exception):
    """A shape that cannot be read or makes no sense; the text says why."""


def whole(n, unit):
    return -(-n // unit) * unit


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int
    tied: bool  # the output matrix is the embedding
    n_ctx: int  # that the model was trained for
    weights: str = "q8_0"
    weight_bytes_known: int = 0  # of a file's tensors

    def check(self):
        for field in ("n_layers", "n_embd", "n_heads", "n_kv_heads", "head_dim", "n_ff", "n_vocab"):
            if not 1 <= getattr(self, field) <= 1 << 24:
                raise ShapeError(f"{self.name}: {field} = {getattr(self, field)} is no size of a model")
        if self.n_heads % self.n_kv_heads:
            raise ShapeError(f"{self.name}: {self.n_heads} query heads do not divide among {self.n_kv_heads} KV heads")
        if self.n_layers > 512 or self.head_dim > 256:
            raise ShapeError(f"{self.name}: at most 512 layers and 256 numbers a head are served")
        if self.weights not in WEIGHT_BITS:
            raise ShapeError(f"{self.name}: weights are one of {', '.join(WEIGHT_BITS)}")
        return self

    @property
    def layer_params(self):
        """Of all layers' matrices: what a prompt's token is multiplied with."""
        attention = self.n_embd * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        return self.n_layers * (attention + 3 * self.n_embd * self.n_ff)

    @property
    def params(self):
        return self.layer_params + (1 if self.tied else 2) * self.n_vocab * self.n_embd

    @property
    def weight_bytes(self):
        return self.weight_bytes_known or int(self.params * WEIGHT_BITS[self.weights] / 8)

    @property
    def step_bytes(self):
        """Weights that a decode step reads: all but an embedding that is looked up only."""
        skipped = 0 if self.tied else self.n_vocab * self.n_embd
        return int(self.weight_bytes * (1 - skipped / self.params))

    # ---- rows, in the stores and in the exact set ----

    def row_bytes(self, rows="f16"):
        """K and V of one token, layer and KV head (layout_row_bytes)."""
        groups = -(-self.head_dim // 32)
        return 2 * (self.head_dim + 2 * groups) if rows == "q8_0" else 4 * self.head_dim

    def token_bytes(self, rows="f16"):
        return self.n_layers * self.n_kv_heads * self.row_bytes(rows)

    def block_bytes(self, rows="f16"):
        """layout_block_bytes"""
        sums = self.n_layers * self.n_kv_heads * 2 * self.head_dim * 4
        return whole(whole(PAGE_BYTES + sums, PAGE_BYTES) + BLOCK_TOKENS * self.token_bytes(rows), PAGE_BYTES)

    def host_bytes(self, n_tokens, rows="f16"):
        """Of a session that may hold n_tokens, in all stores together."""
        return -(-(n_tokens + 1) // BLOCK_TOKENS) * self.block_bytes(rows)

    def exact_bytes(self, n_tokens, rows="f16", exact_tokens=EXACT_TOKENS):
        """Sinks and window, or everything while a session is small."""
        blocks = WINDOW_BLOCKS
        if n_tokens <= exact_tokens:
            blocks = max(blocks, -(-n_tokens // BLOCK_TOKENS))
        return (N_SINKS + BLOCK_TOKENS * blocks) * self.token_bytes(rows)

    # ---- the device, once ----

    def scratch_bytes(self, prefill_chunk=PREFILL_CHUNK, max_batch=MAX_BATCH, rows="f16"):
        """Of a step (allocate_device in gpu-worker/step.c)."""
        n_rows, partial = prefill_chunk + max_batch, self.head_dim + 2
        heads, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        token = self.n_kv_heads * self.row_bytes(rows)
        floats = n_rows * 2 * (self.n_embd + heads + kv + self.n_ff)
        floats += max_batch * (self.n_vocab + self.n_heads * partial)
        floats += BLOCK_TOKENS * self.n_heads * (self.head_dim + (1 + N_LANES) * partial)
        return 4 * floats + n_rows * token + self.n_layers * max_batch * token


def old_blocks(n_tokens, exact_tokens=EXACT_TOKENS):
    """Blocks whose tokens are old when a session has n_tokens (exact_set_n_old_blocks)."""
    block = n_tokens // BLOCK_TOKENS
    return 0 if n_tokens < exact_tokens or block < WINDOW_BLOCKS else block - (WINDOW_BLOCKS - 1)


def old_tokens(n_tokens, exact_tokens=EXACT_TOKENS):
    return max(0, old_blocks(n_tokens, exact_tokens) * BLOCK_TOKENS - N_SINKS)


BUILT_IN = {shape.name.lower(): shape for shape in (
    Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, True, 8192, "q4_1"),
    Shape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, False, 8192, "q8_0"),
    Shape("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256, False, 8192, "q4_k"),
    Shape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, False, 40960, "q8_0"),
)}


# ---- a GGUF file's header ----

class _Header:
    """Reads the header front to back; every length is checked before it is believed."""

    NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def __init__(self, file):
        self._file = file

    def take(self, n):
        if n > 1 << 26:
            raise ShapeError("a piece of its header is larger than any model's")
        data = self._file.read(n)
        if len(data) != n:
            raise ShapeError("it ends inside its header")
        return data

    def number(self, kind):
        return struct.unpack("<" + kind, self.take(struct.calcsize(kind)))[0]

    def text(self):
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind, depth=0):
        """A list is told by its length alone."""
        if kind in self.NUMBERS:
            return self.number(self.NUMBERS[kind])
        if kind == 8:
            return self.text()
        if kind != 9 or depth > 4:
            raise ShapeError(f"it has a value of unknown kind {kind}")
        inner, n = self.number("I"), self.number("Q")
        if inner in self.NUMBERS:
            self.take(n * struct.calcsize(self.NUMBERS[inner]) if n < 1 << 24 else 1 << 30)
        else:
            for _ in range(n):
                self.value(inner, depth + 1)
        return n


def _read_header(header):
    if header.take(4) != b"GGUF":
        raise ShapeError("it is no GGUF file")
    version = header.number("I")
    if version not in (2, 3):
        raise ShapeError(f"it is of GGUF version {version}; 2 and 3 are read")
    n_tensors, n_values = header.number("Q"), header.number("Q")
    if n_tensors > 1 << 20 or n_values > 1 << 20:
        raise ShapeError("its header counts more than any model has")
    values = {}
    for _ in range(n_values):
        name = header.text()
        values[name] = header.value(header.number("I"))
    tensors = {}
    for _ in range(n_tensors):
        name, n_dims = header.text(), header.number("I")
        if n_dims > 8:
            raise ShapeError(f"tensor {name} has {n_dims} dimensions")
        n = math.prod(header.number("Q") for _ in range(n_dims))
        kind, _ = header.number("I"), header.number("Q")
        if kind not in TENSOR_TYPES:
            raise ShapeError(f"tensor {name} is of type {kind}, which is not served")
        per, size = TENSOR_TYPES[kind]
        tensors[name] = -(-n // per) * size
    return values, tensors


def of_gguf(path):
    """The shape of the model in a GGUF file, with the bytes of its own tensors."""
    try:
        with open(path, "rb") as file:
            values, tensors = _read_header(_Header(file))
        kind = values["general.architecture"]

        def size(name, default=None):
            value = values.get(f"{kind}.{name}", default)
            if not isinstance(value, int):
                raise ShapeError(f"its header has no number {kind}.{name}")
            return value

        n_heads, n_embd = size("attention.head_count"), size("embedding_length")
        head_dim = size("attention.key_length", n_embd // max(1, n_heads))
        if size("attention.value_length", head_dim) != head_dim:
            raise ShapeError("its keys and values differ in size, which is not served")
        return Shape(name=str(values.get("general.name", path)), n_layers=size("block_count"), n_embd=n_embd,
                     n_heads=n_heads, n_kv_heads=size("attention.head_count_kv", n_heads), head_dim=head_dim,
                     n_ff=size("feed_forward_length"), n_vocab=size("vocab_size", values.get("tokenizer.ggml.tokens")),
                     tied="output.weight" not in tensors, n_ctx=size("context_length"),
                     weight_bytes_known=sum(tensors.values())).check()
    except (ShapeError, OSError, KeyError) as error:
        why = f"its header has no {error}" if isinstance(error, KeyError) else error
        raise ShapeError(f"{path}: {why}") from error
