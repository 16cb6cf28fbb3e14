// The kernels as a library, for a device whose memory is that of the process that loads it (local_device.py).
#include "host_launch.h"

#include <stdexcept>

namespace {
void fail(const std::string& what) { throw std::runtime_error(what); }
}  // namespace

// Returns what is wrong, or nothing. Per argument a type (see Argument), and its value: of an array the address.
extern "C" const char* launch_kernel(unsigned kernel, u64 threads, unsigned n, const char* types, const i64* values,
                                     const char* order, unsigned seed) {
    static thread_local std::string wrong;
    std::vector<Argument> arguments;
    for (unsigned i = 0; i < n; i++)
        arguments.push_back({types[i], values[i], types[i] ? (void*)values[i] : nullptr});
    try {
        launch(kernel, threads, arguments, order_of(order), seed);
    } catch (const std::runtime_error& e) {
        wrong = e.what();
        return wrong.c_str();
    }
    return nullptr;
}
