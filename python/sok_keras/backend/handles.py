"""What those who are traced, and know a number alone, may ask of the plan or the optimizer behind it."""

import weakref

# Plans by their handle, as long as their layer lives.
plans: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
# What optimizers have in the core, by its handle, as long as they live.
optimizers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
