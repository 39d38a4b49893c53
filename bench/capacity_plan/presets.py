"""What a preset keeps on the device of an old token, and how many of the old tokens a step reads."""

import dataclasses
import json
import math

from capacity_plan import shapes

# Measured on SmolLM2-135M, means over four texts (docs/quality.md): kept at 4,096 and at 8,192 tokens, tables in bytes.
MEASURED = {
    "full": (1.0, 1.0, 0),
    "quality": (0.2252, 0.160, 0),
    "default": (0.1668, 0.106, 3244416),
    "small": (0.1330, 0.085, 2620352),
    "tiny": (0.0962, 0.060, 2620352),
}
OF_HEADS, OF_DIM = 90, 64  # the model that the tables are of
KLT_BYTES = {"default": 10.0, "small": 6.3, "tiny": 6.3}  # of a tile, per dimension (klt_bytes in gpu-worker/keys)


class PresetError(Exception):
    """A preset that is not known, or a file of evaluations that says nothing of it."""


@dataclasses.dataclass(frozen=True)
class Preset:
    name: str
    points: tuple  # ((context, kept), ...), ascending
    fraction: float = None  # of f16 K and V, as measured; None: of the codec's format
    tables: int = 0

    def tile_bytes(self, head_dim):
        """Of 64 keys of a layer and KV head, with the scale of the block's mean, in the mean over the heads."""
        if self.name == "full":
            return 0
        if self.fraction is not None:
            return self.fraction * 4 * head_dim * shapes.BLOCK_TOKENS
        if self.name == "quality":  # rot4: words of 16 dimensions, a byte of scale a key, the mean key
            return 2 * -(-head_dim // 16) * 256 + 64 + shapes.whole(head_dim, 64) + 4
        return KLT_BYTES[self.name] * head_dim + 4

    def key_token_bytes(self, shape):
        return shape.n_layers * shape.n_kv_heads * self.tile_bytes(shape.head_dim) / shapes.BLOCK_TOKENS

    def key_bytes(self, shape, n_tokens, exact_tokens=shapes.EXACT_TOKENS):
        """Allocated for a session of n_tokens: whole chunks."""
        chunks = -(-shapes.old_blocks(n_tokens, exact_tokens) // shapes.CHUNK_BLOCKS)
        return math.ceil(chunks * shapes.CHUNK_BLOCKS * shapes.BLOCK_TOKENS * self.key_token_bytes(shape))

    def table_bytes(self, shape):
        """Tables hold a matrix of head_dim x head_dim a head, for the most part: scaled by that from the measured."""
        return int(self.tables * shape.n_layers * shape.n_kv_heads / OF_HEADS * (shape.head_dim / OF_DIM) ** 2)

    def kept(self, n_tokens, how="power"):
        """
        Share of the old tokens that is read. Inside the measured contexts: the power law through the two points around.
        Below: that of the first two. Beyond: that of the last two goes on ('power'), or the last share stays ('flat').
        """
        points = self.points
        if len(points) == 1:
            return points[0][1]
        if n_tokens >= points[-1][0] and how == "flat":
            return points[-1][1]
        after = next((i for i in range(1, len(points)) if n_tokens <= points[i][0]), len(points) - 1)
        (n0, k0), (n1, k1) = points[after - 1], points[after]
        slope = math.log(k1 / k0) / math.log(n1 / n0)
        return min(1.0, k0 * (n_tokens / n0) ** slope)


def built_in(name):
    if name not in MEASURED:
        raise PresetError(f"no such preset: {name}; there are {', '.join(MEASURED)}, and those of --eval")
    at_4k, at_8k, tables = MEASURED[name]
    points = ((4096, 1.0),) if name == "full" else ((4096, at_4k), (8192, at_8k))
    return Preset(name, points, tables=tables)


def of_evals(files, names):
    """The presets of 'hcattn eval --json' (or its eval.json), several files for several contexts; built-in ones otherwise."""
    seen = {}
    for path in files:
        try:
            with open(path, encoding="utf-8") as file:
                report = json.load(file)
            contexts = {(row["preset"], row["text"]): row["context"] for row in report["rows"]}
            for mean in report["means"]:
                name = mean["preset"]
                own = {context for (preset, _), context in contexts.items() if preset == name}
                if mean["baseline"] or len(own) != 1:
                    continue
                one = seen.setdefault(name, {"points": {}, "fraction": 0.0, "tables": 0})
                one["points"][int(own.pop())] = float(mean["kept"])
                one["fraction"] = float(mean["device_bytes_fraction"])
                one["tables"] = int(mean["table_bytes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PresetError(f"{path}: not a report of 'hcattn eval': {error!r}") from error
    presets = []
    for name in names:
        if name not in seen:
            presets.append(built_in(name))
            continue
        one = seen[name]
        points = {**(dict(built_in(name).points) if name in MEASURED else {}), **one["points"]}
        if not all(0 < kept <= 1 for kept in points.values()):
            raise PresetError(f"{name}: a kept share is not above 0 and at most 1")
        presets.append(Preset(name, tuple(sorted(points.items())), one["fraction"], one["tables"]))
    return presets
