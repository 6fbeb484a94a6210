"""Plans and optimizers by their handles. Traced code holds a handle only."""

import weakref

# Plans, while their layer lives.
plans: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
# Optimizers in the core, while they live.
optimizers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
