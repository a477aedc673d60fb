// Included inside the namespace of one instruction set; see row_kernels_plain.cpp.

/// Four floats: the vector registers that every x86-64 and every 64-bit Arm processor has.
struct Simd {
    static constexpr int kWidth = 4;
    using Vector = float __attribute__((vector_size(16)));

    static Vector set(float value) { return Vector{value, value, value, value}; }
    static Vector add(Vector a, Vector b) { return a + b; }
    static Vector sub(Vector a, Vector b) { return a - b; }
    static Vector mul(Vector a, Vector b) { return a * b; }
    /// a * b + c
    static Vector mul_add(Vector a, Vector b, Vector c) { return a * b + c; }
    static float sum(Vector a) { return (a[0] + a[2]) + (a[1] + a[3]); }

    template <class Element>
    static Vector load(const Element* source) {
        return Vector{to_float(source[0]), to_float(source[1]), to_float(source[2]),
                      to_float(source[3])};
    }
    template <class Element>
    static void store(Element* target, Vector a) {
        for (int i = 0; i < kWidth; ++i) from_float(a[i], target[i]);
    }
    /// The value that storing as Element and loading again gives.
    template <class Element>
    static Vector round_to(Vector a) {
        return Vector{rounded_to<Element>(a[0]), rounded_to<Element>(a[1]),
                      rounded_to<Element>(a[2]), rounded_to<Element>(a[3])};
    }
};
