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
#include "host_launch.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

namespace {

void fail(const std::string& what) {
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

std::map<unsigned, Array> arrays;

Array& array(unsigned number) {
    auto found = arrays.find(number);
    if (found == arrays.end()) fail("there is no array " + std::to_string(number));
    return found->second;
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
                const bool is_array = take<char>() == 'a';
                a.value = take<i64>();
                if (is_array) {
                    a.type = array((unsigned)a.value).type;
                    a.data = array((unsigned)a.value).data;
                }
            }
            launch(kernel, threads, arguments, order, ++seed);
        } else {
            fail("no command " + std::to_string(command));
        }
    }
    for (auto& each : arrays) free(each.second.data);
}
