// Functions of libraries that the process may or may not have loaded.
#pragma once

#include <dlfcn.h>

namespace areal {

// The address of a symbol of the library `soname`, or of any in the global scope; nullptr when there is none. Loads
// nothing. Python loads extension modules, and what they link, with RTLD_LOCAL: the global scope alone lacks them.
inline void* loaded_symbol(const char* soname, const char* symbol) {
  void* const library = dlopen(soname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return dlsym(RTLD_DEFAULT, symbol);
  void* const address = dlsym(library, symbol);
  dlclose(library);  // only undoes the dlopen
  return address != nullptr ? address : dlsym(RTLD_DEFAULT, symbol);
}

}  // namespace areal
