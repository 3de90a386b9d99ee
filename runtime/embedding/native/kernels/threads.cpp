#include "threads.hpp"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace embedding {

namespace {

class Team {
 public:
  ~Team() { resize(1); }

  void resize(size_t count) {
    const std::scoped_lock one_caller(use_);
    {
      const std::scoped_lock hold(lock_);
      ended_ = true;
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
    helpers_.clear();
    ended_ = false;
    for (size_t i = 1; i < count; ++i) {
      helpers_.emplace_back([this, i, seen = round_]() mutable { serve(i, seen); });
    }
    size_ = count;
  }

  size_t size() const { return size_; }

  void run(size_t n, size_t least, const std::function<void(size_t, size_t)>& work) {
    const size_t parts = std::min(size_, n / std::max<size_t>(least, 1));
    std::unique_lock one_caller(use_, std::defer_lock);
    if (parts < 2 || !one_caller.try_lock()) {
      if (n) work(0, n);
      return;
    }
    {
      const std::scoped_lock hold(lock_);
      work_ = &work;
      n_ = n;
      parts_ = parts;
      left_ = parts - 1;
      error_ = nullptr;
      ++round_;
    }
    wake_.notify_all();
    do_part(0);
    std::unique_lock hold(lock_);
    done_.wait(hold, [this] { return left_ == 0; });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void serve(size_t number, size_t seen) {
    for (;;) {
      {
        std::unique_lock hold(lock_);
        wake_.wait(hold, [&] { return ended_ || round_ != seen; });
        if (ended_) return;
        seen = round_;
        if (number >= parts_) continue;
      }
      do_part(number);
      const std::scoped_lock hold(lock_);
      if (--left_ == 0) done_.notify_one();
    }
  }

  void do_part(size_t number) {
    try {
      (*work_)(n_ * number / parts_, n_ * (number + 1) / parts_);
    } catch (...) {
      const std::scoped_lock hold(lock_);
      error_ = std::current_exception();
    }
  }

  std::mutex use_;   // held by the caller whose work is shared
  std::mutex lock_;  // of all below
  std::condition_variable wake_, done_;
  std::vector<std::thread> helpers_;
  const std::function<void(size_t, size_t)>* work_ = nullptr;
  size_t n_ = 0, parts_ = 0, left_ = 0, round_ = 0;
  size_t size_ = 1;
  bool ended_ = false;
  std::exception_ptr error_;
};

Team& team() {
  static Team* one = new Team;  // never destroyed: a helper may outlive static destructors
  return *one;
}

}  // namespace

void set_threads(size_t count) { team().resize(std::max<size_t>(count, 1)); }
size_t threads() { return team().size(); }

void share(size_t n, size_t least_per_thread, const std::function<void(size_t, size_t)>& work) {
  team().run(n, least_per_thread, work);
}

}  // namespace embedding
