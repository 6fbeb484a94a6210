//! The sort of a call's ids by record, and the listing of distinct keys after it.

#![allow(unsafe_code)]

use sok_core::error::Result;

use super::Workspace;
use super::places::Places;
use super::sort_plan::{Scratch, SortPlan, shared_by};
use crate::abi::*;
use crate::device::{Kernel, Stream, launch, launch_shared};
use crate::kernels::{KEYS, SORT};

/// The kernels for a number of ids per thread: `count_digits`, then `sort_pass` by bits of a digit and stride.
pub(super) type SortKernels = [Kernel; 7];

impl Workspace {
    /// Enqueues the sort of ids into `places.sorted`, and the listing of their distinct keys. `records`, `values`: addresses of the
    /// record number and the value of each id.
    pub(super) fn sort(
        &self,
        plan: &SortPlan,
        places: &Places,
        [records, values]: [u64; 2],
        scratch: Scratch,
        stream: Stream,
    ) -> Result<()> {
        let state = places.sort_state;
        let sort = Sort {
            sections: places.sections,
            counts: scratch.counts,
            published: scratch.published,
            flags: state + 4 * SORT_STATE as u64,
            next: state,
            sorted: places.sorted,
            num_sections: plan.sections.len() as u32,
            tiles: plan.tiles as u32,
            rows: plan.rows as u32,
            passes: plan.passes as u32,
            bits: plan.bits,
            pad: 0,
        };
        let kernels = self.sort_kernels(plan.items)?;
        let of_bits = 1 + 2 * (plan.bits - MIN_BITS) as usize;
        let (count, first, others) = (kernels[0], kernels[of_bits], kernels[of_bits + 1]);
        let list = self.device.kernel(&KEYS, "list_keys")?;
        let tile = (plan.items * SORT_THREADS) as u32;
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace and lookup own the memory that they point to.
        unsafe { launch!(count, stream, plan.tiles, SORT_THREADS, records, sort, tile) }?;
        let (mut keys, mut of_keys) = (records, values);
        for pass in 0..plan.passes as u32 {
            let (kernel, to) = (if pass == 0 { first } else { others }, scratch.pairs[pass as usize % 2]);
            let bytes = shared_by(plan.items, plan.bits);
            // SAFETY: The arguments have the types of the kernel's parameters. Workspace and lookup own the memory that they point
            // to.
            unsafe {
                launch_shared!(kernel, stream, plan.tiles, SORT_THREADS, bytes, keys, of_keys, to, sort, pass)
            }?;
            (keys, of_keys) = (to, to + 4);
        }
        let (kinds, tables, sections, num_sections, sorted) =
            (places.keys, self.tables(), places.sections, sort.num_sections, places.sorted);
        let (listed, num_listed) = (places.candidates.listed, places.candidates.num_listed);
        // SAFETY: The arguments have the types of the kernel's parameters. Workspace and lookup own the memory that they point to.
        unsafe {
            launch!(
                list,
                stream,
                plan.lists,
                LIST_THREADS,
                kinds,
                tables,
                sections,
                num_sections,
                sorted,
                listed,
                num_listed
            )
        }
    }

    /// Returns `count_digits`, and for each number of bits `sort_pass` over arrays and over pairs. All are compiled at once, so
    /// that a table that grows need not wait for the compiler.
    fn sort_kernels(&self, items: usize) -> Result<SortKernels> {
        let known = &self.sort_kernels[SORT_ITEMS.iter().position(|i| *i == items).unwrap_or_default()];
        if let Some(kernels) = known.get() {
            return Ok(*kernels);
        }
        let names: [String; 6] = std::array::from_fn(|i| {
            format!("sort_pass<{items}, {}, {}>", MIN_BITS as usize + i / 2, 1 + i % 2)
        });
        let [n0, n1, n2, n3, n4, n5] = names.each_ref().map(String::as_str);
        let kernels = self.device.kernels(&SORT, ["count_digits", n0, n1, n2, n3, n4, n5])?;
        Ok(*known.get_or_init(|| kernels))
    }
}
