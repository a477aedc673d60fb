#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>

#include "attention/params.h"

namespace flash_attn_norm {

/// Fields of a params struct by name; a name left out keeps the struct's default.
class Fields {
  public:
    explicit Fields(const pybind11::dict& dict) : dict_(dict) {}

    template <class T>
    void number(const char* name, T& field) const {
        if (dict_.contains(name)) field = dict_[name].cast<T>();
    }
    template <class T>
    void pointer(const char* name, T*& field) const {
        if (dict_.contains(name)) field = reinterpret_cast<T*>(dict_[name].cast<uintptr_t>());
    }
    void dtype(const char* name, DType& field) const {
        if (dict_.contains(name)) field = static_cast<DType>(dict_[name].cast<int>());
    }
    void strides(const char* name, TensorStrides& field) const {
        if (!dict_.contains(name)) return;
        std::tie(field.batch, field.row, field.head) =
            dict_[name].cast<std::tuple<int64_t, int64_t, int64_t>>();
    }
    void strides(const char* name, BiasStrides& field) const {
        if (!dict_.contains(name)) return;
        std::tie(field.batch, field.head, field.row) =
            dict_[name].cast<std::tuple<int64_t, int64_t, int64_t>>();
    }

  private:
    const pybind11::dict& dict_;
};

inline void read_problem(const Fields& fields, AttentionProblem& problem) {
    fields.dtype("dtype", problem.dtype);
    fields.number("batch_size", problem.batch_size);
    fields.number("seqlen_q", problem.seqlen_q);
    fields.number("seqlen_k", problem.seqlen_k);
    fields.number("total_q", problem.total_q);
    fields.number("total_k", problem.total_k);
    fields.number("num_heads_q", problem.num_heads_q);
    fields.number("num_heads_kv", problem.num_heads_kv);
    fields.number("head_dim", problem.head_dim);
    fields.number("head_dim_v", problem.head_dim_v);
    fields.pointer("cu_seqlens_q", problem.cu_seqlens_q);
    fields.pointer("cu_seqlens_k", problem.cu_seqlens_k);
    fields.number("softmax_scale", problem.softmax_scale);
    fields.number("softcap", problem.softcap);
    fields.number("window_left", problem.window_left);
    fields.number("window_right", problem.window_right);
    fields.number("dropout_p", problem.dropout_p);
    fields.pointer("rng_state", problem.rng_state);
    fields.pointer("alibi_slopes", problem.alibi_slopes);
    fields.number("alibi_batch_stride", problem.alibi_batch_stride);
    fields.pointer("s_aux", problem.s_aux);
    fields.dtype("s_aux_dtype", problem.s_aux_dtype);
    fields.pointer("attn_bias", problem.attn_bias);
    fields.dtype("attn_bias_dtype", problem.attn_bias_dtype);
    fields.strides("attn_bias_strides", problem.attn_bias_strides);
    fields.number("bias_columns", problem.bias_columns);
}

}  // namespace flash_attn_norm
