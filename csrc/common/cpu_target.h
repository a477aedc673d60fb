#pragma once

/// FAN_TARGET_BEGIN("avx2,fma") ... FAN_TARGET_END: functions in between are compiled for these
/// instruction sets, whatever the command line says. The file must end there, because templates
/// are instantiated at its end.
#define FAN_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define FAN_TARGET_BEGIN(isa) \
    FAN_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define FAN_TARGET_END FAN_PRAGMA(clang attribute pop)
#else
// GCC 12 takes its own _mm512_undefined_epi32() for a fault of ours.
#define FAN_TARGET_BEGIN(isa)                                  \
    FAN_PRAGMA(GCC diagnostic ignored "-Wmaybe-uninitialized") \
    FAN_PRAGMA(GCC target(isa))
#define FAN_TARGET_END
#endif
