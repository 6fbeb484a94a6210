"""What those who are traced, and know a number alone, may ask of the plan or the optimizer behind it."""

import weakref

# Plans by their handle, as long as their layer lives.
plans: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
# By the handle of an optimizer, the GPU that its tables are on, if they are on one.
gpus_of_optimizers: dict[int, int] = {}
