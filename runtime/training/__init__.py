"""The executors of every mode over the same stage functions, and what they measure."""
