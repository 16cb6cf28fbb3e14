// Launches of the kernels of KERNELS by their number, their arguments checked against the kernel's signature, which CuPy
// does not do: their number, and of arrays the type. What is wrong is told to `fail`, which the includer defines.
#pragma once

#include "host_cuda.h"

#include <string>
#include <tuple>
#include <type_traits>

#include KERNELS

namespace {

[[noreturn]] void fail(const std::string& what);

struct Argument {
    char type;  // of an array's values, as in NumPy's dtype.char; 0: an integer
    i64 value;
    void* data;
};

size_t size_of(char type) {
    switch (type) {
        case 'b': case 'B': case '?': return 1;
        case 'h': case 'H': return 2;
        case 'i': case 'I': case 'f': return 4;
        case 'q': case 'Q': case 'l': case 'L': case 'd': return 8;
        default: fail(std::string("arrays have no type ") + type);
    }
}

bool is_signed(char type) { return type >= 'a' && type <= 'z'; }

// The data of argument `index`, which must be an array of `size` bytes a value.
void* array_argument(const char* kernel, size_t index, const Argument& argument, size_t size, bool with_sign) {
    std::string where = std::string(kernel) + ": argument " + std::to_string(index);
    if (!argument.type) fail(where + " must be an array");
    const char type = argument.type;
    if (size_of(type) != size || is_signed(type) != with_sign) fail(where + " is an array of the wrong type " + type);
    return argument.data;
}

i64 integer_argument(const char* kernel, size_t index, const Argument& argument) {
    if (argument.type) fail(std::string(kernel) + ": argument " + std::to_string(index) + " must be an integer");
    return argument.value;
}

template <class T> T convert(const char* kernel, size_t index, const Argument& argument) {
    if constexpr (std::is_pointer_v<T>) {
        using Value = std::remove_const_t<std::remove_pointer_t<T>>;
        return (T)array_argument(kernel, index, argument, sizeof(Value), std::is_signed_v<Value>);
    } else {
        static_assert(std::is_same_v<T, i64>, "integers of kernels are 64 bits wide");
        return integer_argument(kernel, index, argument);
    }
}

constexpr unsigned BLOCK = 256;

void check_count(const char* kernel, size_t takes, size_t got) {
    if (takes != got)
        fail(std::string(kernel) + " takes " + std::to_string(takes) + " arguments, not " + std::to_string(got));
}

template <class... A, size_t... I>
void launch(const char* name, void (*kernel)(A...), const std::vector<Argument>& arguments, size_t threads, Order order,
            unsigned seed, std::index_sequence<I...>) {
    check_count(name, sizeof...(A), arguments.size());
    std::tuple<A...> values{convert<A>(name, I, arguments[I])...};
    size_t blocks = threads ? (threads + BLOCK - 1) / BLOCK : 1;
    host_launch((unsigned)blocks, BLOCK, order, seed, [&] { kernel(std::get<I>(values)...); });
}

template <class... A>
void launch(const char* name, void (*kernel)(A...), const std::vector<Argument>& arguments, size_t threads, Order order,
            unsigned seed) {
    launch(name, kernel, arguments, threads, order, seed, std::index_sequence_for<A...>{});
}

Order order_of(const std::string& name) {
    if (name == "forward") return Order::forward;
    if (name == "reverse") return Order::reverse;
    if (name == "random") return Order::random;
    if (name == "parallel") return Order::parallel;
    fail("no order " + name);
}

void launch(unsigned kernel, size_t threads, const std::vector<Argument>& arguments, Order order, unsigned seed) {
    switch (kernel) {
#define X(number, name) case number: launch(#name, name, arguments, threads, order, seed); break;
        EACH_KERNEL
#undef X
        default: fail("there is no kernel " + std::to_string(kernel));
    }
}

}  // namespace
