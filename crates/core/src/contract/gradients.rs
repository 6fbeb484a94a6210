//! Gradients as a framework holds them.

use std::any::Any;

/// Keeps a framework's gradients readable until it is dropped.
pub type Keep = Box<dyn Any + Send + Sync>;

/// The gradient of a feature's output as a framework holds it, `(bags, dim)`.
#[derive(Clone, Copy)]
pub struct GradientRows {
    data: *const f32,
    len: usize,
}

#[allow(unsafe_code)]
mod gradient_rows {
    use super::GradientRows;

    // SAFETY: the floats are read-only, and the caller of `new` promises how long they live.
    unsafe impl Send for GradientRows {}
    // SAFETY: as above.
    unsafe impl Sync for GradientRows {}

    impl GradientRows {
        /// Makes a reference to the floats of a gradient.
        ///
        /// # Safety
        /// `data` holds `len` floats. Nobody writes to them until the call that receives them returns or, if a `Keep` is given with
        /// them, until that is dropped.
        pub unsafe fn new(data: *const f32, len: usize) -> GradientRows {
            GradientRows { data, len }
        }

        /// Returns the floats.
        pub(crate) fn get(&self) -> &[f32] {
            if self.len == 0 {
                return &[];
            }
            // SAFETY: the promise of `new`'s caller; the group drops them with their `Keep`.
            unsafe { std::slice::from_raw_parts(self.data, self.len) }
        }
    }
}
