/* key_codec.c - which codec a policy names; see codec.h. */
#include "gpu-worker/keys/codecs.h"

const struct key_codec *key_codec_find(enum policy_codec codec)
{
    switch (codec) {
    case POLICY_CODEC_F16:
        return &codec_f16;
    case POLICY_CODEC_ROT4:
        return &codec_rot4;
    case POLICY_CODEC_ROT3:
        return &codec_rot3;
    case POLICY_CODEC_ROT2:
        return &codec_rot2;
    case POLICY_CODEC_PAIR3:
        return &codec_pair3;
    case POLICY_CODEC_PAIR2:
        return &codec_pair2;
    case POLICY_CODEC_PAIR1:
        return &codec_pair1;
    case POLICY_CODEC_KLT2:
        return &codec_pair_klt2;
    case POLICY_CODEC_KLT1:
        return &codec_pair_klt1;
    case POLICY_CODEC_KLT0:
        return &codec_pair_klt0;
    case POLICY_CODEC_PQ:
        return &codec_pq;
    case POLICY_CODEC_NONE:
    default:
        break;
    }
    return NULL;
}
