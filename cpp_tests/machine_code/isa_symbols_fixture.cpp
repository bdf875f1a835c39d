// Two faults for isa_symbols.py to find: an inline function that stays out of line, and a function outside the
// namespace of its instruction set.
namespace areal {

__attribute__((noinline)) inline int shared_by_all_isas(int x) { return x + 1; }

int misplaced(int x) { return shared_by_all_isas(x); }

namespace baseline {
int placed(int x) { return shared_by_all_isas(x); }
}  // namespace baseline
}  // namespace areal
