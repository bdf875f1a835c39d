#include "source_line.h"

#include <cxxabi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

extern "C" const char __executable_start[];  // set by the linker

namespace cuda_shim::race {
namespace {

constexpr int kFramesShown = 3;

bool is_shim_header(const std::string& place) {
  for (const char* header :
       {"atomics.h:", "device_math.h:", "engine.h:", "intrinsics.h:", "std_function.h:", "tuple:"}) {
    if (place.rfind(header, 0) == 0) return true;
  }
  return false;
}

}  // namespace

uintptr_t program_start() { return reinterpret_cast<uintptr_t>(__executable_start); }

std::string source_line(uintptr_t return_address) {
  std::ostringstream command;
  command << "addr2line -i -e /proc/" << getpid() << "/exe 0x" << std::hex << return_address - 1 - program_start()
          << " 2>/dev/null";
  FILE* pipe = popen(command.str().c_str(), "r");
  if (pipe == nullptr) return "?";
  std::string places;
  int shown = 0;
  for (char line[1024]; std::fgets(line, sizeof line, pipe) != nullptr;) {
    const std::string path(line, std::strcspn(line, " \n"));
    const size_t slash = path.rfind('/');
    const std::string place = slash == std::string::npos ? path : path.substr(slash + 1);
    if (is_shim_header(place) || shown == kFramesShown) continue;
    places += (shown++ == 0 ? "" : " < ") + place;
  }
  pclose(pipe);
  return places.empty() ? "?" : places;
}

std::string variable_name(const char* mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  if (status != 0) return mangled;
  std::string name(text);
  std::free(text);
  const size_t colon = name.rfind("::");
  return colon == std::string::npos ? name : name.substr(colon + 2);
}

}  // namespace cuda_shim::race
