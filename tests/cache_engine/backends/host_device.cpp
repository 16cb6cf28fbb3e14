// A device on the host: holds arrays and launches the kernels of kernels.cu, as told on standard input.
//
// Each array is an allocation of its own and exactly as long as asked for, so that AddressSanitizer sees what oversteps it,
// and is filled with garbage at first. Arguments are checked against the kernel's signature, which CuPy does not do:
// their number, and of arrays the type. Anything wrong ends the process with a line on standard error.
//
//   host_device ORDER        ORDER: forward, reverse, random, parallel
//
// Commands, each a letter and little-endian fields:
//   C u32 seed                                        forget all arrays; number the launches from `seed`
//   E u32 array, char type, u64 count                 new array, of a type as in NumPy's dtype.char
//   W u32 array, u64 bytes, data                      write from its start
//   R u32 array, u64 bytes                            answer with its first bytes
//   L u32 kernel, u64 threads, u32 n, n arguments     launch; an argument is 'a' u64 array or 'i' i64 value
#include "host_cuda.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>

#include KERNELS

namespace {

[[noreturn]] void fail(const std::string& what) {
    fprintf(stderr, "host_device: %s\n", what.c_str());
    exit(3);
}

void take(void* to, size_t bytes) {
    if (bytes && fread(to, 1, bytes, stdin) != bytes) fail("the input ends within a command");
}

template <class T> T take() {
    T value;
    take(&value, sizeof value);
    return value;
}

struct Array {
    char type = 0;
    size_t bytes = 0;
    void* data = nullptr;
};

struct Argument {
    bool is_array;
    i64 value;
};

std::map<unsigned, Array> arrays;

size_t size_of(char type) {
    switch (type) {
        case 'b': case 'B': return 1;
        case 'h': case 'H': return 2;
        case 'i': case 'I': case 'f': return 4;
        case 'q': case 'Q': case 'l': case 'L': case 'd': return 8;
        default: fail(std::string("arrays have no type ") + type);
    }
}

bool is_signed(char type) { return type >= 'a' && type <= 'z'; }

Array& array(unsigned number) {
    auto found = arrays.find(number);
    if (found == arrays.end()) fail("there is no array " + std::to_string(number));
    return found->second;
}

// The data of argument `index`, which must be an array of `size` bytes a value.
void* array_argument(const char* kernel, size_t index, const Argument& argument, size_t size, bool with_sign) {
    std::string where = std::string(kernel) + ": argument " + std::to_string(index);
    if (!argument.is_array) fail(where + " must be an array");
    const Array& a = array((unsigned)argument.value);
    if (size_of(a.type) != size || is_signed(a.type) != with_sign) fail(where + " is an array of the wrong type " + a.type);
    return a.data;
}

i64 integer_argument(const char* kernel, size_t index, const Argument& argument) {
    if (argument.is_array) fail(std::string(kernel) + ": argument " + std::to_string(index) + " must be an integer");
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

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) fail("usage: host_device ORDER");
    const Order order = order_of(argv[1]);
    unsigned seed = 0;
    for (int command = getchar(); command != EOF; command = getchar()) {
        if (command == 'C') {
            seed = take<unsigned>();
            for (auto& each : arrays) free(each.second.data);
            arrays.clear();
        } else if (command == 'E') {
            unsigned number = take<unsigned>();
            Array a;
            a.type = take<char>();
            a.bytes = take<u64>() * size_of(a.type);
            a.data = malloc(a.bytes);
            memset(a.data, 0xA5, a.bytes);
            if (!arrays.emplace(number, a).second) fail("there is an array " + std::to_string(number) + " already");
        } else if (command == 'W') {
            Array& a = array(take<unsigned>());
            u64 bytes = take<u64>();
            if (bytes > a.bytes) fail("a write oversteps its array");
            take(a.data, bytes);
        } else if (command == 'R') {
            Array& a = array(take<unsigned>());
            u64 bytes = take<u64>();
            if (bytes > a.bytes) fail("a read oversteps its array");
            fwrite(a.data, 1, bytes, stdout);
            fflush(stdout);
        } else if (command == 'L') {
            unsigned kernel = take<unsigned>();
            u64 threads = take<u64>();
            std::vector<Argument> arguments(take<unsigned>());
            for (Argument& a : arguments) {
                a.is_array = take<char>() == 'a';
                a.value = take<i64>();
            }
            seed++;
            switch (kernel) {
#define X(number, name) case number: launch(#name, name, arguments, threads, order, seed); break;
                EACH_KERNEL
#undef X
                default: fail("there is no kernel " + std::to_string(kernel));
            }
        } else {
            fail("no command " + std::to_string(command));
        }
    }
    for (auto& each : arrays) free(each.second.data);
}
