#include "source_line.h"

#include <cxxabi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

extern "C" const char __executable_start[];  // set by the linker

namespace cuda_shim::race {

uintptr_t program_start() { return reinterpret_cast<uintptr_t>(__executable_start); }

std::string source_line(uintptr_t return_address) {
  std::ostringstream command;
  command << "addr2line -i -e /proc/" << getpid() << "/exe 0x" << std::hex << return_address - 1 - program_start()
          << " 2>/dev/null";
  FILE* pipe = popen(command.str().c_str(), "r");
  if (pipe == nullptr) return "?";
  std::string place = "?";
  bool found = false;  // the first frame, innermost first, that is the kernel's
  for (char line[1024]; std::fgets(line, sizeof line, pipe) != nullptr;) {
    if (found) continue;
    const std::string text(line, std::strcspn(line, " \n"));
    const size_t slash = text.rfind('/');
    place = slash == std::string::npos ? text : text.substr(slash + 1);
    found = true;
    for (const char* header : {"atomics.h:", "device_math.h:", "intrinsics.h:"}) {
      if (place.rfind(header, 0) == 0) found = false;
    }
  }
  pclose(pipe);
  return place;
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
