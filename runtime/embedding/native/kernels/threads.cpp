#include "threads.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "buffers.hpp"

namespace embedding {

namespace {

class Team {
 public:
  explicit Team(size_t size = 1) : size_(size) {}

  void resize(size_t count) {
    const std::scoped_lock one_caller(use_);
    end_helpers();
    size_ = count;
    start_helpers();
  }

  size_t size() const { return size_; }

  void run(size_t n, size_t least, const std::function<void(size_t, size_t)>& work) {
    least = std::max<size_t>(least, 1);
    std::unique_lock one_caller(use_, std::defer_lock);
    if (n / least < 2 || !one_caller.try_lock()) {
      if (n) work(0, n);
      return;
    }
    try {
      start_helpers();  // there are none yet in a child that was forked
    } catch (const std::system_error&) {  // then the caller does all
    }
    // The size is only read under `use_`: a caller that waited here for a smaller team must not wait
    // for helpers that have gone.
    const size_t parts = std::min<size_t>(size_, n / least);
    if (parts < 2) {
      work(0, n);
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

  // Around a fork: no call is shared at that instant, so the child's copy is in order.
  void lock_for_fork() { use_.lock(); }
  void unlock_after_fork() { use_.unlock(); }

 private:
  void start_helpers() {
    try {
      while (helpers_.size() + 1 < size_) {
        const size_t number = helpers_.size() + 1;
        helpers_.emplace_back([this, number, seen = round_]() mutable { serve(number, seen); });
      }
    } catch (...) {
      end_helpers();
      size_ = 1;
      throw;
    }
  }

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

  std::mutex use_;   // held by the caller whose work is shared, and while the team changes
  std::mutex lock_;  // of all below but size_ and helpers_, which `use_` guards
  std::condition_variable wake_, done_;
  std::vector<std::thread> helpers_;
  const std::function<void(size_t, size_t)>* work_ = nullptr;
  size_t n_ = 0, parts_ = 0, left_ = 0, round_ = 0;
  std::atomic<size_t> size_;  // atomic for those who only ask
  bool ended_ = false;
  std::exception_ptr error_;
};

// Never destroyed: a helper may outlive static destructors.
std::atomic<Team*> current{nullptr};

void before_fork() {
  current.load()->lock_for_fork();
  hold_buffers();
}

void after_fork_in_parent() {
  release_buffers();
  current.load()->unlock_after_fork();
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

void set_threads(size_t count) { team().resize(std::max<size_t>(count, 1)); }
size_t threads() { return team().size(); }

void share(size_t n, size_t least_per_thread, const std::function<void(size_t, size_t)>& work) {
  team().run(n, least_per_thread, work);
}

}  // namespace embedding
