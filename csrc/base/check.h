// Errors of the core. Broken contracts (bad shapes, out-of-range labels) throw areal::Error, whose text
// reads "<op>: expected <what>, got <value>". The torch bindings let it pass to Python, where the wrapper
// of the op re-raises it as ValueError.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace areal {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Concatenates anything printable: format_message("expected ", 3, ", got ", x).
template <class... Parts>
std::string format_message(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace areal

// Throws areal::Error with the given message parts when the condition is false. Evaluated in every build.
#define AREAL_CHECK(condition, ...)                               \
  do {                                                            \
    if (!(condition)) [[unlikely]]                                \
      throw ::areal::Error(::areal::format_message(__VA_ARGS__)); \
  } while (false)
