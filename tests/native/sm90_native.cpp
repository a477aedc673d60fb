// Host-side logic of the Hopper kernels for Python tests: the order of the tiles, the layout of
// tiles in shared memory, matrix descriptors and the shapes of tensor maps.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/params.h"
#include "attention/sm90/bwd_tile_order.h"
#include "attention/sm90/fwd_config.h"
#include "attention/sm90/fwd_work.h"
#include "attention/sm90/tensor_map.h"
#include "attention/sm90/tile_layout.h"

namespace py = pybind11;
using namespace flash_attn_norm;
using namespace flash_attn_norm::sm90;

namespace {

py::dict dict_of(const FwdWork& work) {
    py::dict dict;
    dict["sequence"] = work.sequence;
    dict["head"] = work.head;
    dict["block"] = work.block;
    dict["row_q"] = work.row_q;
    dict["row_k"] = work.row_k;
    dict["seqlen_q"] = work.seqlen_q;
    dict["seqlen_k"] = work.seqlen_k;
    dict["left"] = work.left;
    dict["right"] = work.right;
    dict["blocks"] = std::make_tuple(work.blocks.begin, work.blocks.end, work.blocks.full_begin,
                                     work.blocks.full_end);
    return dict;
}

/// The tiles of a packed problem in one of the lists, as the device makes them.
std::vector<PackedTile> packed_tiles(const AttentionProblem& problem, int block_m, int short_rows,
                                     bool of_short, int64_t least_rows) {
    std::vector<PackedTile> tiles;
    if (!problem.is_packed()) return tiles;
    for (int sequence = 0; sequence <= problem.batch_size; ++sequence) {
        const TileCounts counts = tile_counts(problem, sequence, block_m, short_rows, least_rows);
        const int count = of_short ? counts.in_short : counts.in_long;
        for (int block = 0; block < count; ++block) tiles.push_back(PackedTile{sequence, block});
    }
    return tiles;
}

/// The tiles that have rows, in the order of the walk.
std::vector<py::dict> walk_tiles(const AttentionProblem& problem, int block_m, int block_n,
                                 int short_rows = 0, bool of_short = false,
                                 int64_t least_rows = 0) {
    FwdTileWalk walk = FwdTileWalk::make(problem, block_m);
    const std::vector<PackedTile> list =
        packed_tiles(problem, block_m, short_rows, of_short, least_rows);
    const int listed = static_cast<int>(list.size());
    if (problem.is_packed()) {
        walk.list = FwdTileList{list.data(), &listed};
        walk.load_count();
    }
    std::vector<py::dict> tiles;
    for (int index = 0; index < walk.count(); ++index) {
        FwdWork work;
        walk.find(index, work);
        if (complete_work(problem, block_m, block_n, work)) tiles.push_back(dict_of(work));
    }
    return tiles;
}

std::vector<py::dict> fwd_tiles_dense(int64_t batch_size, int64_t seqlen_q, int64_t seqlen_k,
                                      int num_heads, std::tuple<int64_t, int64_t> window,
                                      int block_m, int block_n) {
    AttentionProblem problem;
    problem.batch_size = batch_size;
    problem.seqlen_q = seqlen_q;
    problem.seqlen_k = seqlen_k;
    problem.total_q = batch_size * seqlen_q;
    problem.total_k = batch_size * seqlen_k;
    problem.num_heads_q = problem.num_heads_kv = num_heads;
    problem.head_dim = problem.head_dim_v = 128;
    std::tie(problem.window_left, problem.window_right) = window;
    return walk_tiles(problem, block_m, block_n);
}

std::vector<py::dict> fwd_tiles_packed(const std::vector<int32_t>& cu_seqlens_q,
                                       const std::vector<int32_t>& cu_seqlens_k, int64_t total_q,
                                       int64_t total_k, int num_heads,
                                       std::tuple<int64_t, int64_t> window, int block_m,
                                       int block_n, int short_rows, bool of_short,
                                       int64_t least_rows) {
    AttentionProblem problem;
    problem.batch_size = static_cast<int64_t>(cu_seqlens_q.size()) - 1;
    problem.total_q = total_q;
    problem.total_k = total_k;
    problem.num_heads_q = problem.num_heads_kv = num_heads;
    problem.head_dim = problem.head_dim_v = 128;
    problem.cu_seqlens_q = cu_seqlens_q.data();
    problem.cu_seqlens_k = cu_seqlens_k.data();
    std::tie(problem.window_left, problem.window_right) = window;
    return walk_tiles(problem, block_m, block_n, short_rows, of_short, least_rows);
}

/// Byte offset of every unit of 16 bytes: [row][unit].
template <class Layout>
std::vector<std::vector<int>> unit_offsets() {
    std::vector<std::vector<int>> offsets(Layout::kRows, std::vector<int>(Layout::kColumns / 8));
    for (int row = 0; row < Layout::kRows; ++row) {
        for (int unit = 0; unit < Layout::kColumns / 8; ++unit) {
            offsets[row][unit] = Layout::unit_offset(row, unit);
        }
    }
    return offsets;
}

template <int kRows, int kColumns>
void bind_layout(py::module_& module) {
    using Layout = TileLayout<kRows, kColumns>;
    const std::string name =
        "tile_layout_" + std::to_string(kRows) + "x" + std::to_string(kColumns);
    module.def(name.c_str(), [] {
        py::dict layout;
        layout["bytes"] = Layout::kBytes;
        layout["chunk_columns"] = Layout::kChunkColumns;
        layout["chunk_bytes"] = Layout::kChunkBytes;
        layout["row_bytes"] = Layout::kRowBytes;
        layout["unit_offsets"] = unit_offsets<Layout>();
        std::vector<int> columns, rows;
        for (int k = 0; k < kColumns / 16; ++k) columns.push_back(Layout::column_step_offset(k));
        for (int k = 0; k < kRows / 16; ++k) rows.push_back(Layout::row_step_offset(k));
        layout["column_steps"] = columns;
        layout["row_steps"] = rows;
        layout["column_descriptor"] = Layout::column_descriptor(0x12400);
        layout["row_descriptor"] = Layout::row_descriptor(0x12400);
        return layout;
    });
}

/// What encode_tensor_map() is given for a tensor of class kColumns.
template <int kColumns>
void bind_map(py::module_& module) {
    const std::string name = "tensor_map_shape_" + std::to_string(kColumns);
    module.def(name.c_str(), [](std::tuple<int64_t, int64_t, int64_t, int64_t> shape,
                                std::tuple<int64_t, int64_t, int64_t> strides, int box_rows) {
        TensorShape tensor;
        std::tie(tensor.batch_size, tensor.rows, tensor.heads, tensor.head_dim) = shape;
        TensorStrides elements;
        std::tie(elements.batch, elements.row, elements.head) = strides;
        const TensorMapShape map = tensor_map_shape<kColumns>(tensor, elements, box_rows);
        py::dict dict;
        dict["sizes"] = std::vector<uint64_t>(map.sizes, map.sizes + 4);
        dict["stride_bytes"] = std::vector<uint64_t>(map.stride_bytes, map.stride_bytes + 3);
        dict["box"] = std::make_tuple(map.box_columns, map.box_rows);
        dict["swizzle_bytes"] = map.swizzle == Swizzle::k128Bytes ? 128 : 64;
        return dict;
    });
}

/// (unit, block) of every tile of a dense causal backward pass on Hopper, in the order of the grid,
/// and the places that units have for sums of dQ.
/// The tiles in their order, and of how many units some are at work, or have a place, at a time.
std::tuple<std::vector<std::pair<int, int>>, int, int> bwd_tiles(int batch_size, int num_heads_q,
                                                                 int num_heads_kv, int64_t seqlen,
                                                                 int head_splits, int block_n,
                                                                 int tiles_at_once) {
    AttentionProblem problem;
    problem.batch_size = batch_size;
    problem.num_heads_q = num_heads_q;
    problem.num_heads_kv = num_heads_kv;
    problem.seqlen_q = problem.seqlen_k = seqlen;
    problem.head_dim = problem.head_dim_v = 128;
    problem.window_right = 0;
    const BwdTileOrder order = bwd_tile_order(problem, head_splits, block_n, tiles_at_once);
    std::vector<std::pair<int, int>> tiles;
    for (int i = 0; i < order.units * order.blocks; ++i) {
        const auto tile = order.tile(i);
        tiles.emplace_back(tile.unit, tile.block);
    }
    return {tiles, order.at_work(tiles_at_once), order.places(tiles_at_once)};
}

}  // namespace

void bind_sm90(py::module_& module) {
    module.def("fwd_tiles_dense", &fwd_tiles_dense);
    module.def("fwd_tiles_packed", &fwd_tiles_packed, py::arg("cu_seqlens_q"),
               py::arg("cu_seqlens_k"), py::arg("total_q"), py::arg("total_k"),
               py::arg("num_heads"), py::arg("window"), py::arg("block_m"), py::arg("block_n"),
               py::arg("short_rows") = 0, py::arg("of_short") = false, py::arg("least_rows") = 0);
    module.attr("kShortRows") = kShortRows;
    module.attr("kShortKeys") = kShortKeys;
    module.def("bwd_tiles", &bwd_tiles);
    bind_layout<128, 64>(module);
    bind_layout<192, 64>(module);
    bind_layout<128, 96>(module);
    bind_layout<128, 128>(module);
    bind_layout<112, 192>(module);
    bind_layout<80, 256>(module);
    bind_map<64>(module);
    bind_map<96>(module);
    bind_map<256>(module);
    module.def("can_map_tensor", [](std::tuple<int64_t, int64_t, int64_t, int64_t> shape,
                                    std::tuple<int64_t, int64_t, int64_t> strides, uintptr_t data) {
        TensorShape tensor;
        std::tie(tensor.batch_size, tensor.rows, tensor.heads, tensor.head_dim) = shape;
        TensorStrides elements;
        std::tie(elements.batch, elements.row, elements.head) = strides;
        return can_map_tensor(tensor, elements, reinterpret_cast<const void*>(data));
    });
}
