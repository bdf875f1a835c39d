// A __shared__ variable is a thread_local static of a function in an anonymous namespace, hence a local TLS symbol
// "_ZZ<function>E<name>". The symbol table lists local symbols by translation unit, after a symbol of kind FILE; the
// units that include cuda_shim.h show it by their local symbol cuda_shim_unit_marker.
#include "shared_arrays.h"

#include <elf.h>
#include <link.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>

#include "engine.h"

namespace cuda_shim {
namespace {

constexpr std::string_view kUnitMarker = "cuda_shim_unit_marker";

struct TlsSymbol {
  uint64_t offset, bytes;
  std::string name;
};

// The shared variables among the local symbols of one translation unit.
void take_unit(std::vector<TlsSymbol>& unit, bool marked, std::vector<TlsSymbol>& shared) {
  if (marked) shared.insert(shared.end(), std::make_move_iterator(unit.begin()), std::make_move_iterator(unit.end()));
  unit.clear();
}

std::vector<TlsSymbol> read_symbols(const std::string& image) {
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(image.data());
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(image.data() + header->e_shoff);
  std::vector<TlsSymbol> shared, unit;
  for (int s = 0; s < header->e_shnum; ++s) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const char* names = image.data() + sections[sections[s].sh_link].sh_offset;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(image.data() + sections[s].sh_offset);
    bool marked = false;
    for (unsigned i = 0; i < sections[s].sh_info; ++i) {  // sh_info: the number of local symbols
      const std::string_view name = names + symbols[i].st_name;
      const int type = symbols[i].st_info & 0xf;
      if (type == STT_FILE) {
        take_unit(unit, marked, shared);
        marked = false;
      }
      marked |= name.find(kUnitMarker) != name.npos;
      if (type == STT_TLS && name.substr(0, 3) == "_ZZ") {
        unit.push_back({symbols[i].st_value, symbols[i].st_size, std::string(name)});
      }
    }
    take_unit(unit, marked, shared);
  }
  return shared;
}

// Start of this thread's copy of the main program's thread-local storage.
char* program_tls() {
  char* tls = nullptr;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* result) {
        *static_cast<void**>(result) = info->dlpi_tls_data;
        return 1;  // the first entry is the program
      },
      &tls);
  return tls;
}

std::vector<SharedArray> find() {
  std::vector<SharedArray> arrays;
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string image{std::istreambuf_iterator<char>(file), {}};
  if (image.size() < sizeof(ElfW(Ehdr)) || std::memcmp(image.data(), ELFMAG, SELFMAG) != 0) {
    throw Error("cuda_shim: cannot read the program's symbol table from /proc/self/exe");
  }
  for (const TlsSymbol& symbol : read_symbols(image)) {
    arrays.push_back({program_tls() + symbol.offset, symbol.bytes, symbol.name});
  }
  return arrays;
}

}  // namespace

const std::vector<SharedArray>& shared_arrays() {
  static thread_local const std::vector<SharedArray> arrays = find();
  return arrays;
}

}  // namespace cuda_shim
