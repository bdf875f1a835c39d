// What the shim reports of a launch.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cuda_shim/engine.h"

namespace cuda_shim {

// The message of the Error that body() throws, "" if none.
template <class Body>
std::string finding_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace cuda_shim
