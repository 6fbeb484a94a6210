"""What those who are traced, and know a number alone, may ask of the plan or the optimizer behind it."""

import weakref

# Plans by their handle, as long as their layer lives.
plans: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
# Handles of the optimizers whose tables are on a GPU.
optimizers_on_gpu: set[int] = set()
