/// A hidden copy of a libc variable that shared_ptr's reference counts read.
///
/// It came with glibc 2.32, and importing it would bar a variant from the systems that
/// manylinux_2_28 promises (2.28 and later). Zero says that there may be several threads, which is
/// always right.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
