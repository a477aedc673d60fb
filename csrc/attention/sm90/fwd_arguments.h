#pragma once

#include <cuda.h>

#include "attention/params.h"
#include "attention/sm90/fwd_work.h"

namespace flash_attn_norm {
namespace sm90 {

/// What a launch hands to the kernel. The maps come first: they must be 64-byte aligned.
struct FwdArguments {
    CUtensorMap map_q, map_k, map_v;  // boxes of a tile's rows
    CUtensorMap map_out;              // boxes of the rows that are stored at once
    AttentionFwdParams params;
    FwdTileWalk walk;
    bool lists_few_tiles = false;  // packed: the kernel lists its tiles itself
    int* tile_counter = nullptr;   // zero at the start; null: tiles are dealt out in turn
};

}  // namespace sm90
}  // namespace flash_attn_norm
