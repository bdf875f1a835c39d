// The expected failures of the engine, which Python raises as the classes of areal_core.errors that bear the same
// names. A broken contract (wrong shape, foreign descriptor) stays a plain areal::Error, a ValueError in Python.
#pragma once

#include "base/check.h"

namespace areal::reshard {

// A deadline passed; the text says what was awaited and from whom.
class DeadlineError : public Error {
 public:
  using Error::Error;
};

// Bytes differ from the checksum taken when they were written.
class CorruptedError : public Error {
 public:
  using Error::Error;
};

// A peer is gone, or does not speak as it should (foreign token, another plan); the text names its rank.
class PeerError : public Error {
 public:
  using Error::Error;
};

// cancel() was called, here or by the owner of a transport.
class CancelledError : public Error {
 public:
  using Error::Error;
};

}  // namespace areal::reshard
