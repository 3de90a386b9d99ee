// What is used of this machine: the widest instruction set, the better level of cache for prefetching
// (measured once), and a team of threads.
#include "machine.hpp"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.hpp"

namespace embedding {

bool rows_into_first_level = false;

namespace {

const Kernels* find(const char* name) {
#ifdef EMBEDDING_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && (!name || std::strcmp(name, "avx512") == 0)) return &kernels_avx512;
  if (avx2 && (!name || std::strcmp(name, "avx2") == 0)) return &kernels_avx2;
#endif
  return !name || std::strcmp(name, "scalar") == 0 ? &kernels_scalar : nullptr;
}

std::atomic<const Kernels*> chosen{nullptr};

constexpr size_t kRow = 128;
constexpr size_t kBytes = size_t{2} << 20;
constexpr size_t kRows = kBytes / kRow;
constexpr size_t kTurn = 512;  // rows of one level before the other has its turn
constexpr size_t kAhead = 16;
constexpr double kWorth = 0.95;  // the first level must be clearly faster

std::once_flag settled;
std::tuple<double, double> found;  // for who asks

void forget(const char* rows) {
#if defined(__x86_64__)
  for (size_t at = 0; at < kBytes; at += 64) _mm_clflush(rows + at);
  _mm_mfence();
#endif
}

// An odd factor goes once through all rows, in an order that no hardware prefetcher knows.
size_t row_at(size_t i) { return (i * (kGolden >> 32 | 1)) % kRows * kRow; }

template <bool First>
uint32_t walk(const char* rows, size_t from) {
  uint32_t sum = 0;
  for (size_t i = from; i < from + kTurn; ++i) {
    for (size_t line = 0; line < kRow; line += 64) {
      prefetch<First>(rows + row_at(i + kAhead) + line);
    }
    uint32_t one, other;
    std::memcpy(&one, rows + row_at(i), sizeof one);
    std::memcpy(&other, rows + row_at(i) + 64, sizeof other);
    sum += one + other;
  }
  return sum;
}

void measure() {
  void* memory = std::aligned_alloc(size_t{2} << 20, kBytes);
  if (!memory) return;
  madvise(memory, kBytes, MADV_HUGEPAGE);
  std::memset(memory, 1, kBytes);
  const char* rows = static_cast<const char*>(memory);
  forget(rows);
  using Clock = std::chrono::steady_clock;
  double ns[2] = {1e9, 1e9};
  volatile uint32_t sink = 0;
  for (size_t from = 0, turn = 0; from + kTurn <= kRows; from += kTurn, ++turn) {
    const auto began = Clock::now();
    sink = sink + (turn % 2 ? walk<false>(rows, from) : walk<true>(rows, from));
    const std::chrono::duration<double, std::nano> took = Clock::now() - began;
    double& least = ns[turn % 2];  // others on the machine only ever add
    if (took.count() / kTurn < least) least = took.count() / kTurn;
  }
  std::free(memory);
  found = {ns[0], ns[1]};
  rows_into_first_level = ns[0] < kWorth * ns[1];
}

// CRC-32C, its register kept inverted: a byte at a time by a table, or eight by the instruction.
constexpr uint32_t kCastagnoli = 0x82F63B78u;  // the polynomial 0x1EDC6F41, lowest bit first

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? kCastagnoli : 0);
    table[byte] = rest;
  }
  return table;
}

uint32_t crc_by_table(const unsigned char* at, size_t bytes, uint32_t sum) {
  static constexpr std::array<uint32_t, 256> kTable = crc_table();
  for (; bytes; --bytes) sum = sum >> 8 ^ kTable[(sum ^ *at++) & 0xFF];
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc_by_word(const unsigned char* at, size_t bytes,
                                                       uint32_t sum) {
  uint64_t wide = sum;
  for (; bytes >= 8; at += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  return crc_by_table(at, bytes, static_cast<uint32_t>(wide));
}
#endif

// The register that says how a thread computes, and its bits for denormals.
#if defined(__x86_64__)
constexpr uint32_t kFlush = 1u << 15 | 1u << 6;  // flush to zero; denormals are zeros (MXCSR)
uint32_t arithmetic() { return _mm_getcsr(); }
void set_arithmetic(uint32_t bits) { _mm_setcsr(bits); }
#elif defined(__aarch64__)
constexpr uint64_t kFlush = uint64_t{1} << 24;  // FZ, of inputs and results (FPCR)
uint64_t arithmetic() {
  uint64_t bits;
  asm volatile("mrs %0, fpcr" : "=r"(bits));
  return bits;
}
void set_arithmetic(uint64_t bits) { asm volatile("msr fpcr, %0" : : "r"(bits)); }
#else
constexpr uint32_t kFlush = 0;
uint32_t arithmetic() { return 0; }
void set_arithmetic(uint32_t) {}
#endif

constexpr size_t kPieces = 4;  // of a call for each thread: who is held up leaves more to the others

// Threads that help whoever calls. Several callers may share work at once, as fetch and push of a run
// do: none takes a thread from the other, for each may have as many as the team's size says.
class Team {
 public:
  using Work = std::function<void(size_t, size_t)>;

  explicit Team(size_t size = 1) : size_(size) {}

  void resize(size_t count) {
    if (count == size_) return;
    close();
    end_helpers();
    size_ = count;
    std::exception_ptr error;
    try {
      const std::scoped_lock hold(lock_);
      start_helpers(count - 1);
    } catch (...) {
      error = std::current_exception();
    }
    if (error) {
      end_helpers();
      size_ = 1;
    }
    open();
    if (error) std::rethrow_exception(error);
  }

  size_t size() const { return size_; }

  void run(size_t n, size_t least, const Work& work) {
    const size_t pieces = n / std::max<size_t>(least, 1);
    if (pieces < 2 || size_ < 2) {
      if (n) work(0, n);
      return;
    }
    Call call(work, n, pieces);
    if (enter(call)) {
      do_parts(call);
      leave(call);
    } else {
      work(0, n);
    }
    if (call.error) std::rethrow_exception(call.error);
  }

  // No call is shared between these two, as around a fork: then the child's copy is in order.
  void close() {
    std::unique_lock hold(lock_);
    opened_.wait(hold, [this] { return !closed_; });
    closed_ = true;
    opened_.wait(hold, [this] { return calls_.empty(); });
  }

  void open() {
    {
      const std::scoped_lock hold(lock_);
      closed_ = false;
    }
    opened_.notify_all();
  }

 private:
  // One caller's work, cut into parts, which are taken in turn by whoever is free.
  struct Call {
    Call(const Work& work, size_t n, size_t pieces) : work(work), n(n), pieces(pieces) {}
    bool has_more() const { return next.load(std::memory_order_relaxed) < parts; }
    const Work& work;
    const size_t n, pieces;
    const decltype(embedding::arithmetic()) arithmetic = embedding::arithmetic();  // the caller's
    size_t parts = 0, most_helpers = 0;  // set before any helper sees it
    std::atomic<size_t> next{0};
    size_t helpers = 0;  // at work on it
    std::exception_ptr error;
  };

  // Lets helpers see the call; false where the team has shrunk meanwhile.
  bool enter(Call& call) {
    std::unique_lock hold(lock_);
    opened_.wait(hold, [this] { return !closed_; });
    if (size_ < 2) return false;
    call.parts = std::min(size_ * kPieces, call.pieces);
    call.most_helpers = std::min<size_t>(size_, call.pieces) - 1;
    calls_.push_back(&call);
    try {
      const size_t wanted = helpers_.size() - idle_ + call.most_helpers;
      start_helpers(std::min(wanted, kCallers * (size_ - 1)));
    } catch (const std::system_error&) {  // then those that are there do it
    }
    hold.unlock();
    for (size_t k = 0; k < call.most_helpers; ++k) wake_.notify_one();
    return true;
  }

  void leave(Call& call) {
    std::unique_lock hold(lock_);
    done_.wait(hold, [&] { return call.helpers == 0; });
    std::erase(calls_, &call);
    if (closed_ && calls_.empty()) opened_.notify_all();
  }

  // Call with the lock.
  void start_helpers(size_t count) {
    while (helpers_.size() < count) helpers_.emplace_back([this] { serve(); });
  }

  // While no call is shared.
  void end_helpers() {
    {
      const std::scoped_lock hold(lock_);
      ended_ = true;
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
    helpers_.clear();
    ended_ = false;
  }

  void serve() {
    std::unique_lock hold(lock_);
    for (;;) {
      ++idle_;
      Call* call = nullptr;
      wake_.wait(hold, [&] { return ended_ || (call = unfinished()) != nullptr; });
      --idle_;
      if (ended_) return;
      ++call->helpers;
      hold.unlock();
      set_arithmetic(call->arithmetic);
      do_parts(*call);
      hold.lock();
      if (--call->helpers == 0) done_.notify_all();
    }
  }

  // The call with the fewest helpers of those that want one more.
  Call* unfinished() const {
    Call* least = nullptr;
    for (Call* call : calls_) {
      if (call->helpers >= call->most_helpers || !call->has_more()) continue;
      if (!least || call->helpers < least->helpers) least = call;
    }
    return least;
  }

  void do_parts(Call& call) {
    size_t part;
    while ((part = call.next.fetch_add(1, std::memory_order_relaxed)) < call.parts) {
      try {
        call.work(call.n * part / call.parts, call.n * (part + 1) / call.parts);
      } catch (...) {
        const std::scoped_lock hold(lock_);
        call.error = std::current_exception();
      }
    }
  }

  static constexpr size_t kCallers = 2;  // that may share work at once with all their threads

  std::mutex lock_;  // of all below; size_ may be read without it
  std::condition_variable wake_, done_, opened_;
  std::vector<std::thread> helpers_;
  std::vector<Call*> calls_;
  std::atomic<size_t> size_;
  size_t idle_ = 0;  // helpers that wait
  bool closed_ = false, ended_ = false;
};

// Never destroyed: a helper may outlive static destructors.
std::atomic<Team*> current{nullptr};

void before_fork() {
  current.load()->close();
  hold_buffers();
}

void after_fork_in_parent() {
  release_buffers();
  current.load()->open();
}

// A child has none of the helpers, and what they waited on is in no state to be used: a fresh team
// of the same size starts its own at the first call that shares work. The old one is left as it is.
void after_fork_in_child() {
  release_buffers();
  current.store(new Team(current.load()->size()));
}

Team& team() {
  static const bool once = [] {
    current.store(new Team);
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return true;
  }();
  static_cast<void>(once);
  return *current.load();
}

}  // namespace

void flush_denormals(bool on) {
  if (on == flushes_denormals()) return;
  set_arithmetic(on ? arithmetic() | kFlush : arithmetic() & ~kFlush);

  // OpenMP's pool of this thread, if torch has one already; the function is of OpenMP 5.0.
  constexpr int kSoftly = 1;
  using Pause = int (*)(int);
  if (const auto pause = reinterpret_cast<Pause>(dlsym(RTLD_DEFAULT, "omp_pause_resource_all"))) {
    pause(kSoftly);
  }
}

bool flushes_denormals() { return kFlush && (arithmetic() & kFlush) == kFlush; }

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
  const auto* at = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool by_word = (__builtin_cpu_init(), __builtin_cpu_supports("sse4.2") != 0);
  if (by_word) return ~crc_by_word(at, bytes, ~before);
#endif
  return ~crc_by_table(at, bytes, ~before);
}

void set_threads(size_t count) { team().resize(std::max<size_t>(count, 1)); }
size_t threads() { return team().size(); }

void share(size_t n, size_t least_per_thread, const std::function<void(size_t, size_t)>& work) {
  team().run(n, least_per_thread, work);
}

const Kernels& kernels() {
  const Kernels* set = chosen.load(std::memory_order_acquire);
  if (!set) chosen.store(set = find(nullptr), std::memory_order_release);
  return *set;
}

bool choose_kernels(const char* name) {
  const Kernels* set = find(name);
  if (set) chosen.store(set, std::memory_order_release);
  return set != nullptr;
}

void settle_prefetch() {
  std::call_once(settled, [] {
    const char* given = std::getenv("PERSIA_PREFETCH");
    if (!given) return measure();
    const std::string level = given;
    if (level != "l1" && level != "l2") {
      throw std::invalid_argument("PERSIA_PREFETCH must be l1 or l2, got '" + level +
                                  "'; leave it away to let the engine measure");
    }
    rows_into_first_level = level == "l1";
  });
}

std::string prefetch_level() {
  settle_prefetch();
  return rows_into_first_level ? "l1" : "l2";
}

std::tuple<double, double> prefetch_probe() { return found; }

}  // namespace embedding
