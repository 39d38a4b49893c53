/* codecs.h - the codecs behind key_codec_find(), for that alone. */
#pragma once

#include "gpu-worker/keys/codec.h"

extern const struct key_codec codec_f16;  /* as the rows have them */
extern const struct key_codec codec_rot4; /* codec_rot.h */
extern const struct key_codec codec_rot3;
extern const struct key_codec codec_rot2;
extern const struct key_codec codec_pq;    /* codec_pq.h */
extern const struct key_codec codec_pair3; /* codec_pair.h */
extern const struct key_codec codec_pair2;
extern const struct key_codec codec_pair1;
extern const struct key_codec codec_pair_klt2;
extern const struct key_codec codec_pair_klt1;
extern const struct key_codec codec_pair_klt0;
