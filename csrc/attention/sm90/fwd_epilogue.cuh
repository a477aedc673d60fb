#pragma once

#include <cstdint>

#include "attention/element.cuh"
#include "attention/online_softmax.cuh"
#include "attention/params.h"
#include "attention/sm90/fwd_arguments.h"
#include "attention/sm90/fwd_shared_storage.h"
#include "attention/sm90/fwd_work.h"
#include "ptx/global_memory.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// Named barriers; 0 is __syncthreads().
constexpr int kBarrierTurn = 1;    // one per consumer warpgroup
constexpr int kBarrierOutput = 4;  // one per consumer warpgroup
constexpr int kBarrierValuesCleared = 7;

/// The sink of the tile's head in natural units, -inf for none; rows that no sequence covers have
/// none either.
__device__ __forceinline__ float sink_of(const AttentionProblem& problem, const FwdWork& work) {
    if (problem.s_aux == nullptr || work.sequence == problem.batch_size) {
        return negative_infinity();
    }
    return load_as_float(problem.s_aux, problem.s_aux_dtype, work.head);
}

/// Where a warpgroup's 64 rows of the tile go.
struct FwdRows {
    int first = 0;  // in the sequence
    int count = 0;  // that exist, up to 64
    int batch = 0;
    float* lse = nullptr;     // of the first row
    uint16_t* out = nullptr;  // likewise
    int64_t row_stride = 0;   // of out

    __device__ __forceinline__ FwdRows(const AttentionFwdParams& params, const FwdWork& work,
                                       int block_m, int warpgroup) {
        const AttentionProblem& problem = params.problem;
        first = work.block * block_m + 64 * warpgroup;
        count = min(work.seqlen_q - first, 64);
        batch = problem.is_packed() ? 0 : work.sequence;
        const int64_t lse_row =
            problem.is_packed()
                ? int64_t{work.head} * problem.total_q + work.row_q
                : (int64_t{batch} * problem.num_heads_q + work.head) * problem.seqlen_q;
        lse = params.softmax_lse + lse_row + first;
        row_stride = int64_t{problem.num_heads_q} * problem.head_dim_v;
        const int64_t row = int64_t{batch} * problem.seqlen_q + work.row_q + first;
        out = static_cast<uint16_t*>(params.out) + row * row_stride +
              int64_t{work.head} * problem.head_dim_v;
    }
};

/// Rows that see no key: output 0, LSE -inf or the sink.
template <class Config>
__device__ __forceinline__ void store_empty_rows(const FwdArguments& arguments, const FwdWork& work,
                                                 int warpgroup, int thread) {
    ptx::make_opaque(thread);
    const AttentionProblem& problem = arguments.params.problem;
    const FwdRows rows(arguments.params, work, Config::kBlockM, warpgroup);
    const int units = problem.head_dim_v / 8;
    for (int i = thread; i < rows.count * units; i += 128) {
        const int row = i / units, unit = i - row * units;
        *reinterpret_cast<uint4*>(rows.out + row * rows.row_stride + unit * 8) =
            make_uint4(0, 0, 0, 0);
    }
    if (thread < rows.count) rows.lse[thread] = sink_of(problem, work);
}

/// The four lanes of a quad hold four 32-bit words each; afterwards lane q holds word q of every
/// lane, in the order of the lanes.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const uint32_t received =
                __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i + step], step);
            words[i] = upper ? received : words[i];
            words[i + step] = upper ? words[i + step] : received;
        }
    }
}

/// Two rows of O per lane, normalised and rounded.
template <class Config>
struct OutputRows {
    const float (&acc_o)[1][Config::kTilesD][4];
    const float (&normalizer)[2];

    /// This lane's two columns of group d of eight, in its row r.
    __device__ __forceinline__ uint32_t pair(int d, int r) const {
        return Config::Element::pack(acc_o[0][d][2 * r] * normalizer[r],
                                     acc_o[0][d][2 * r + 1] * normalizer[r]);
    }
};

/// From the registers to memory, 64 bytes of a row at a time: no tile of shared memory, no barrier.
template <class Config>
__device__ __forceinline__ void store_rows_directly(const FwdRows& rows,
                                                    const OutputRows<Config>& output, int units,
                                                    int thread) {
    const int lane = thread & 31;
    const int row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int d = 0; d < Config::kTilesD; d += 4) {
        const int unit = d + lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32_t words[4] = {output.pair(d, r), output.pair(d + 1, r), output.pair(d + 2, r),
                                 output.pair(d + 3, r)};
            transpose_quad(words, lane);
            ptx::st_global_if(row + 8 * r < rows.count && unit < units,
                              rows.out + (row + 8 * r) * rows.row_stride + unit * 8,
                              make_uint4(words[0], words[1], words[2], words[3]));
        }
    }
}

/// Through the warpgroup's or the warp's part of the output tile, from where the copy engine takes
/// it. Nobody else touches that part, so no warpgroup waits for another.
template <class Config>
__device__ __forceinline__ void store_rows_by_tile(FwdSharedStorage<Config>& shared,
                                                   const FwdArguments& arguments,
                                                   const FwdWork& work, const FwdRows& rows,
                                                   const OutputRows<Config>& output, int warpgroup,
                                                   int thread) {
    using Layout = typename Config::LayoutO;
    const AttentionProblem& problem = arguments.params.problem;
    constexpr int kRows = Config::kStoreRows, kThreads = 2 * kRows;
    const int lane = thread & 31;
    const int member = thread % kThreads;
    const int first_row = thread / kThreads * kRows;  // of the warpgroup's
    const int tile_row = 64 * warpgroup + first_row;
    const auto wait_for_others = [&] {
        if (kThreads == 32) {
            __syncwarp();
        } else {
            ptx::bar_sync(kBarrierOutput + warpgroup, 128);
        }
    };
    if (member == 0) ptx::bulk_wait_group_read<0>();  // the last tile's store
    wait_for_others();
    const uint32_t tile = ptx::shared_address(shared.out.bytes);
    const int my_row = tile_row + member / 32 * 16 + lane % 16;
#pragma unroll
    for (int d = 0; d < Config::kTilesD; d += 2) {
        ptx::stmatrix_x4(tile + Layout::unit_offset(my_row, d + lane / 16), output.pair(d, 0),
                         output.pair(d, 1), output.pair(d + 1, 0), output.pair(d + 1, 1));
    }
    ptx::fence_proxy_async_shared();
    wait_for_others();

    // No barrier inside these branches: the compiler would have to reckon with lanes that part, and
    // keep nothing of the main loop in uniform registers.
    const int count = min(rows.count - first_row, kRows);
    const int units = problem.head_dim_v / 8;
    if (!problem.is_packed() || count == kRows) {
        if (member == 0 && count > 0) {
#pragma unroll 1
            for (int c = 0; c * Layout::kUnitsPerRow < units; ++c) {
                ptx::tma_store_4d(&arguments.map_out,
                                  tile + c * Layout::kChunkBytes + tile_row * Layout::kRowBytes,
                                  c * Layout::kChunkColumns, work.row_q + rows.first + first_row,
                                  work.head, rows.batch);
            }
            ptx::bulk_commit_group();
        }
    } else {  // the copy engine would write on into the next sequence
        for (int i = member; i < count * units; i += kThreads) {
            const int row = i / units, unit = i - row * units;
            *reinterpret_cast<uint4*>(rows.out + (first_row + row) * rows.row_stride + unit * 8) =
                *reinterpret_cast<const uint4*>(shared.out.bytes +
                                                Layout::unit_offset(tile_row + row, unit));
        }
    }
}

/// Writes a warpgroup's rows of the output and their LSE.
template <class Config>
__device__ __forceinline__ void store_output(FwdSharedStorage<Config>& shared,
                                             const FwdArguments& arguments, const FwdWork& work,
                                             int warpgroup, int thread,
                                             const OutputRows<Config>& output,
                                             const float (&lse)[2]) {
    ptx::make_opaque(thread);  // no address of this function in the main loop's registers
    const FwdRows rows(arguments.params, work, Config::kBlockM, warpgroup);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * r;
        if (thread % 4 == 0 && row < rows.count) rows.lse[row] = lse[r];
    }
    if constexpr (Config::kTile.output_tile) {
        store_rows_by_tile(shared, arguments, work, rows, output, warpgroup, thread);
    } else {
        store_rows_directly(rows, output, arguments.params.problem.head_dim_v / 8, thread);
    }
}

}  // namespace sm90
}  // namespace flash_attn_norm
