"""What deqfast relies on inside of torch: each assumption is stated here once, and tested for each version."""
