#include "attention/decode/combine.cuh"

namespace flash_attn_norm {
namespace decode {

template void launch_combine<Sm80>(const SplitParams&, DType, cudaStream_t);

}  // namespace decode
}  // namespace flash_attn_norm
