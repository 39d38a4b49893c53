"""The rules of the source tree as data: who may include whom, and who may use what. check_tree.py applies them."""

# folder -> folders of ours it may include (itself always)
OURS = {
    "common": [],
    "proto": ["common"],
    "kernels": [],
    "coordinator": ["common", "proto", "kernels"],
    "value-store": ["common", "proto", "kernels"],
    "gpu-worker": ["common", "proto", "kernels"],
    "client": ["common", "proto"],
    "bench": ["common", "proto", "kernels", "gpu-worker"],  # it measures kernels and back ends alone
    "gateway": ["common", "proto", "client"],
}

# pattern of an outside header -> patterns of the files that may include it (tests may include anything)
OUTSIDE = {
    r"zmq\.h": [r"common/socket(_keys)?\.c"],
    r"hwloc.*\.h": [r"common/topology\.c"],
    r"protobuf-c/.*": [r"proto/.*"],
    r"(cuda|cublas).*\.h": [r"gpu-worker/backend/cuda/.*"],
    r"(open)?(cblas|blas|cblas.*)\.h": [r"gpu-worker/backend/.*"],
    r"(immintrin|x86intrin)\.h": [r"kernels/.*", r"gpu-worker/backend/cpu/.*", r"gpu-worker/keys/.*",
                                  r"value-store/.*"],
    r"(pcre2|utf8proc)\.h": [r"gpu-worker/model/.*", r"gpu-worker/fastgen/fastgen_kinds\.c"],
    r"jansson\.h": [r"client/.*", r"gateway/.*", r"bench/.*"],
    r"cmocka\.h": [],
}

# Messages stop at the server: in these folders only files whose path matches may see protobuf or ZeroMQ: the server, and
# its link to the coordinator. The coordinator is little else than messages; placement and descriptors are its core.
MESSAGE_FOLDERS = ["coordinator", "value-store", "gpu-worker"]
MESSAGE_HEADERS = [r"proto/.*\.pb-c\.h", r"common/socket(_keys)?\.h"]
MESSAGE_FILES = [r"[^/]+/(server|main|link)[^/]*\.[ch]", r"coordinator/(?!placement|descriptors)[^/]*\.[ch]"]

# Calls that belong to one file.
CALLS = {
    r"\b(secure_)?getenv\s*\(": [r"common/options\.c"],
    r"\benviron\b": [r"common/options\.c"],
}

MAX_LINES = 600
CODE_FOLDERS = sorted(OURS) + ["tests"]

# External symbols that no file of ours chooses: the program's, the sanitizers', the protobuf compiler's.
FREE_SYMBOLS = [r"main", r"__.*"]
# The emulation stands in for the CUDA runtime: names are NVIDIA's, and those of C++.
GENERATED_OBJECTS = [r".*\.pb-c\.c\.o", r"emulation(_[a-z]+)?\.cpp\.o"]
