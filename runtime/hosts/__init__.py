"""What only runs over several processes and hosts need. Without this folder a run trains in one
process: nothing but the doors in `runtime.rank.doors` leads here, and `tests/test_annexes.py`
takes it out."""
