// What the race checker remembers of each memory location: the last write and up to two reads since. Internal.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <memory>
#include <unordered_map>

namespace cuda_shim::race {

struct Access {
  uint32_t cluster = 0;  // serial number in the launch, from 1; 0: no access yet
  uint32_t clock = 0;    // of the slot, see HappensBefore
  uint32_t pc = 0;       // relative to the program's start
  uint16_t slot = 0;     // of the thread, or of the queue of bulk copies
  bool atomic = false;

  bool exists() const { return cluster != 0; }
};

struct Cell {
  Access write;
  std::array<Access, 2> reads;
};

// Shadow cells by address. A cell covers an aligned word of 4 bytes until part of the word is accessed; then each byte
// gets its own.
class Shadow {
 public:
  void clear() {
    pages_.clear();
    last_page_ = nullptr;
  }

  // Calls visit(address, Cell&) for the cells of [address, address + bytes).
  template <class Visit>
  void for_each_cell(uintptr_t address, size_t bytes, Visit visit) {
    const uintptr_t end = address + bytes;
    while (address < end) {
      Page& page = page_of(address);
      const size_t offset = address % kPageBytes, word = offset / kWordBytes;
      if (offset % kWordBytes == 0 && end - address >= kWordBytes && !page.split[word]) {
        visit(address, page.words[word]);
        address += kWordBytes;
      } else {
        if (!page.split[word]) split(page, word);
        visit(address, page.bytes[offset]);
        ++address;
      }
    }
  }

 private:
  static constexpr size_t kPageBytes = 1024, kWordBytes = 4;

  struct Page {
    std::array<Cell, kPageBytes / kWordBytes> words;
    std::bitset<kPageBytes / kWordBytes> split;
    std::unique_ptr<Cell[]> bytes;
  };

  Page& page_of(uintptr_t address) {
    const uintptr_t number = address / kPageBytes;
    if (last_page_ == nullptr || number != last_number_) {
      std::unique_ptr<Page>& page = pages_[number];
      if (!page) page = std::make_unique<Page>();
      last_page_ = page.get();
      last_number_ = number;
    }
    return *last_page_;
  }
  static void split(Page& page, size_t word) {
    if (!page.bytes) page.bytes = std::make_unique<Cell[]>(kPageBytes);
    for (size_t i = 0; i < kWordBytes; ++i) page.bytes[word * kWordBytes + i] = page.words[word];
    page.split[word] = true;
  }

  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  uintptr_t last_number_ = 0;
  Page* last_page_ = nullptr;
};

}  // namespace cuda_shim::race
