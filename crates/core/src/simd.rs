//! Instructions that the compiler does not choose by itself: prefetches, non-temporal stores, and loops built for AVX2.
#![allow(unsafe_code)]

/// Prefetches the cache line of `value`.
#[inline(always)]
pub fn prefetch<T>(value: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address has no effect but on the cache.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(value.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Prefetches all cache lines of `values`.
#[inline(always)]
pub fn prefetch_slice<T>(values: &[T]) {
    let base = values.as_ptr().cast::<u8>();
    let mut offset = 0;
    while offset < size_of_val(values) {
        prefetch(base.wrapping_add(offset));
        offset += 64;
    }
}

/// Copies `from` to `to` with non-temporal stores, for output that is larger than the cache.
#[inline(always)]
pub fn copy_streaming(to: &mut [f32], from: &[f32]) {
    assert_eq!(to.len(), from.len());
    #[cfg(target_arch = "x86_64")]
    if (to.as_ptr() as usize).is_multiple_of(16) {
        use core::arch::x86_64::{_mm_loadu_ps, _mm_stream_ps};
        let (to_chunks, to_rest) = to.as_chunks_mut::<4>();
        let (from_chunks, from_rest) = from.as_chunks::<4>();
        for (to, from) in to_chunks.iter_mut().zip(from_chunks) {
            // SAFETY: - `from` has four floats, `to` has room for four: their types.
            //         - `to` is 16-byte aligned: checked above, and chunks are 16 bytes apart.
            let four = unsafe { _mm_loadu_ps(from.as_ptr()) };
            // SAFETY: as above.
            unsafe { _mm_stream_ps(to.as_mut_ptr(), four) };
        }
        to_rest.copy_from_slice(from_rest);
        return;
    }
    to.copy_from_slice(from);
}

/// Copies a row as `copy_streaming` does, for a constant length.
#[inline(always)]
pub fn stream_row<const D: usize>(to: &mut [f32; D], from: &[f32; D]) {
    #[cfg(target_arch = "x86_64")]
    if D.is_multiple_of(4) && (to.as_ptr() as usize).is_multiple_of(16) {
        use core::arch::x86_64::{_mm_loadu_ps, _mm_stream_ps};
        for (to, from) in to.as_chunks_mut::<4>().0.iter_mut().zip(from.as_chunks::<4>().0) {
            // SAFETY: as in `copy_streaming`.
            let four = unsafe { _mm_loadu_ps(from.as_ptr()) };
            // SAFETY: as above.
            unsafe { _mm_stream_ps(to.as_mut_ptr(), four) };
        }
        return;
    }
    *to = *from;
}

/// Completes the non-temporal stores of this thread. A thread calls it after its last `copy_streaming`, before other threads read.
#[inline(always)]
pub fn streaming_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        core::arch::x86_64::_mm_sfence()
    };
}

/// A loop that is compiled for the baseline and for AVX2. The whole loop is compiled twice, because a call inside of it would cost as
/// much as the wider instructions save.
pub trait Kernel {
    /// What the loop returns.
    type Output;
    /// Runs the loop. It must be `#[inline(always)]`, and so must each function that its loops call.
    fn run(self) -> Self::Output;
}

/// Runs the best build of `kernel` for this processor.
#[inline]
pub fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("lzcnt")
        && is_x86_feature_detected!("f16c")
    {
        // SAFETY: the processor has what the function is compiled for: checked above.
        return unsafe { with_avx2(kernel) };
    }
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,f16c,lzcnt,popcnt")]
fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

/// Converts float16 to float32 by F16C, eight at a time. Returns how many.
#[inline(always)]
pub fn widen_halves(halves: &[u16], floats: &mut [f32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("f16c") {
        // SAFETY: the processor has F16C: checked above.
        return unsafe { f16c::widen(halves, floats) };
    }
    let _ = (halves, floats);
    0
}

/// Rounds float32 to the nearest float16 by F16C, eight at a time, ties to even. Returns how many: up to eight among which one is not a number.
#[inline(always)]
pub fn narrow_to_halves(floats: &[f32], halves: &mut [u16]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("f16c") {
        // SAFETY: as above.
        return unsafe { f16c::narrow(floats, halves) };
    }
    let _ = (floats, halves);
    0
}

#[cfg(target_arch = "x86_64")]
mod f16c {
    use core::arch::x86_64::{
        _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cmp_ps,
        _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_movemask_ps, _mm256_storeu_ps,
    };

    #[inline]
    #[target_feature(enable = "f16c")]
    pub fn widen(halves: &[u16], floats: &mut [f32]) -> usize {
        let (from, to) = (halves.as_chunks::<8>().0, floats.as_chunks_mut::<8>().0);
        for (from, to) in from.iter().zip(to) {
            // SAFETY: it has 16 bytes.
            let x = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
            let x = _mm256_cvtph_ps(x);
            // SAFETY: it has room for eight.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), x) };
        }
        halves.len().min(floats.len()) / 8 * 8
    }

    #[inline]
    #[target_feature(enable = "f16c")]
    pub fn narrow(floats: &[f32], halves: &mut [u16]) -> usize {
        let mut done = 0;
        for (from, to) in floats.as_chunks::<8>().0.iter().zip(halves.as_chunks_mut::<8>().0) {
            // SAFETY: it has eight.
            let x = unsafe { _mm256_loadu_ps(from.as_ptr()) };
            if _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x)) != 0 {
                break;
            }
            let x = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            // SAFETY: it has room for 16 bytes.
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), x) };
            done += 8;
        }
        done
    }
}
