//! Ids that are made distinct ahead of their lookup, beside an earlier step.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
use cudarc::driver::{CudaEvent, CudaStream};
use sok_core::contract::batch::Combiner;
use sok_core::contract::gradients::Keep;
use sok_core::error::Result;

use super::ShardedGpuGroup;
use super::asked::requests_of;
use super::layout::LookupLayout;
use crate::device::{Device, Stream, driver_error};
use crate::gpu_table::GpuTable;
use crate::memory::Buffer;
use crate::peers::Window;
use crate::step::{Asking, Bags, Feature, LookupOptions, RowSource, Started, When};

/// A lookup whose ids are known.
struct AheadLookup {
    forms: Vec<Form>,
    features: Vec<Feature<'static>>,
    /// `None` until its ids are being made distinct.
    begun: Option<Begun>,
    /// Keeps the ids.
    _keep: Keep,
}

/// What makes the ids of a later lookup distinct.
struct Begun {
    window: Window,
    asking: Asking,
    /// By table: whether its owner pools its bags.
    at_owner: Vec<bool>,
    started: Started,
    scratch: Option<Buffer<u32>>,
    /// Recorded when they are distinct.
    done: CudaEvent,
}

/// What must be equal of a feature for its ids to have the same places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    table: usize,
    num_ids: usize,
    num_bags: usize,
    /// Number of ids of a bag.
    hotness: usize,
    combiner: Combiner,
    padding_key: Option<u64>,
}

/// Lookups whose ids are known, oldest first, and memory to make them distinct.
pub(super) struct AheadLookups {
    lookups: VecDeque<AheadLookup>,
    merge_blocks: usize,
    stream: Arc<CudaStream>,
    /// Recorded on streams that are waited for.
    before: CudaEvent,
    spare_askings: Vec<Asking>,
    spare_scratches: Vec<Buffer<u32>>,
}

/// A lookup whose ids were made distinct.
pub(super) struct KnownIds {
    pub window: Window,
    pub asking: Asking,
    /// By table: whether its owner pools its bags.
    pub at_owner: Vec<bool>,
}

/// Maximum number of lookups that are known ahead. One more drops the oldest.
const MOST: usize = 2;

impl AheadLookups {
    /// Without lookups. `merge_blocks`: in how many blocks the batch of a rank is merged.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) if the driver makes no stream.
    pub fn new(device: &Device, merge_blocks: usize) -> Result<AheadLookups> {
        let context = &device.context;
        Ok(AheadLookups {
            lookups: VecDeque::new(),
            merge_blocks,
            stream: context.new_stream().map_err(driver_error("making a stream"))?,
            before: event(device)?,
            spare_askings: Vec::new(),
            spare_scratches: Vec::new(),
        })
    }

    /// Number of bytes that are kept.
    pub fn num_bytes(&self) -> usize {
        let begun = self.lookups.iter().filter_map(|lookup| lookup.begun.as_ref());
        let bytes =
            |begun: &Begun| begun.asking.num_bytes() + begun.scratch.as_ref().map_or(0, Buffer::num_bytes);
        let used: usize = begun.map(bytes).sum();
        let askings: usize = self.spare_askings.iter().map(Asking::num_bytes).sum();
        used + askings + self.spare_scratches.iter().map(Buffer::num_bytes).sum::<usize>()
    }
}

fn event(device: &Device) -> Result<CudaEvent> {
    device.context.new_event(Some(CU_EVENT_DISABLE_TIMING)).map_err(driver_error("making an event"))
}

/// The forms of features, if their ids can be made distinct ahead: those with weights or row splits cannot, which other arrays decide.
fn forms_of(features: &[Feature]) -> Option<Vec<Form>> {
    let form = |feature: &Feature| {
        let hotness = match feature.bags {
            Bags::Each => 1,
            Bags::Fixed { hotness, .. } => hotness,
            Bags::Ragged { .. } => return None,
        };
        let (table, num_ids, num_bags) = (feature.table, feature.ids.len, feature.num_bags());
        let (combiner, padding_key) = (feature.combiner, feature.padding_key);
        let is_plain = feature.weights.is_none() && feature.scores.is_none();
        is_plain.then_some(Form { table, num_ids, num_bags, hotness, combiner, padding_key })
    };
    features.iter().map(form).collect()
}

impl ShardedGpuGroup {
    /// Tells the ids of a later training lookup, which are made distinct beside other work: at once if they are those of the next lookup,
    /// otherwise from the end of the next lookup on, beside dense layers. `stream`: on which the ids are ready; `None` if they are. No
    /// other rank is asked.
    ///
    /// Nothing depends on it. The lookup compares its ids with these; if they are others, it does all by itself.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory, or if a kernel cannot be compiled or launched.
    ///
    /// # Safety
    /// The addresses of ids are of memory on this device that lives until `keep` is dropped.
    pub unsafe fn prefetch(
        &mut self,
        features: &[Feature],
        keep: Keep,
        stream: Option<Stream>,
    ) -> Result<()> {
        let Some(forms) = forms_of(features) else { return Ok(()) };
        // An id outside a vocabulary is an error of the lookup itself, which it reports as it makes ids distinct.
        let is_left_out = |feature: &Feature| {
            feature.validate().is_err() || self.front.tables.get(feature.table).is_none_or(GpuTable::refuses)
        };
        if features.iter().any(is_left_out) {
            return Ok(());
        }
        if let Some(stream) = stream {
            stream.record(&self.ahead.before)?;
            Stream::of_cudarc(&self.ahead.stream).wait(&self.ahead.before)?;
        }
        while self.ahead.lookups.len() >= MOST {
            let old = self.ahead.lookups.pop_front().and_then(|old| old.begun);
            self.end_ahead(old)?;
        }
        let features = features.iter().map(|feature| feature.named("of a later call")).collect();
        self.ahead.lookups.push_back(AheadLookup { forms, features, begun: None, _keep: keep });
        if self.ahead.lookups.len() == 1 { self.begin_ahead() } else { Ok(()) }
    }

    /// Enqueues making the ids distinct of the lookups that are known, after what the group has enqueued.
    pub(super) fn begin_ahead(&mut self) -> Result<()> {
        for i in 0..self.ahead.lookups.len() {
            if self.ahead.lookups[i].begun.is_none() {
                let features = std::mem::take(&mut self.ahead.lookups[i].features);
                let begun = self.make_distinct(&features);
                self.ahead.lookups[i].features = features;
                self.ahead.lookups[i].begun = begun?;
            }
        }
        Ok(())
    }

    /// Returns `None` if that cannot be done ahead.
    fn make_distinct(&mut self, features: &[Feature]) -> Result<Option<Begun>> {
        if self.front.tables.iter().any(|table| table.has_moved) {
            return Ok(None);
        }
        let aside = Stream::of_cudarc(&self.ahead.stream);
        if let Some(stream) = self.front.workspace.last_stream() {
            stream.record(&self.ahead.before)?;
            aside.wait(&self.ahead.before)?;
        }
        let mut features = features.to_vec();
        self.choose_at_owner(&mut features, true);
        let mut at_owner = vec![false; self.owners.len()];
        features.iter().for_each(|feature| at_owner[feature.table] |= feature.at_owner);
        let requests = requests_of(self.owners.len(), &features);
        let world_size = self.peers.world_size();
        let layout = LookupLayout::new(&self.shard.tables, &requests, world_size);
        let windows = self.front.windows.as_mut().expect("a front has windows");
        let mut window = windows.take(layout.bytes)?;
        self.peers.send(&mut [&mut window])?;
        let spare = self.ahead.spare_askings.pop();
        let mut asking = match spare {
            Some(asking) => asking,
            None => Asking::new(&self.front.workspace.device, &self.owners, self.ahead.merge_blocks)?,
        };
        let (to, rows) = layout.addresses(window.address(), self.distinct.address(), world_size);
        let mut scratch = self.ahead.spare_scratches.pop();
        let (owners, front) = (&self.owners, &mut self.front);
        let (tables, inserts) = (&mut front.tables, vec![true; owners.len()]);
        let rows = RowSource::Ranks(&rows);
        let options = LookupOptions { inserts: &inserts, absent: &[], save: true, number: None, rows };
        let started = front.workspace.aside(&mut scratch, |workspace| {
            let mut started = workspace.start(tables, &features, options, aside)?;
            if !started.has_coefficients() {
                workspace.ask(&mut asking, &mut started, owners, &to, false, When::Ahead, aside)?;
            }
            Ok(started)
        })?;
        let has_coefficients = started.has_coefficients();
        let done = event(&self.front.workspace.device)?;
        aside.record(&done)?;
        let begun = Some(Begun { window, asking, at_owner, started, scratch, done });
        if has_coefficients {
            // They are in memory of the lookup itself.
            self.end_ahead(begun)?;
            return Ok(None);
        }
        Ok(begun)
    }

    /// Returns what was begun for a lookup of these features, if anything was. Work on the stream then comes after it, and uses its
    /// scratch memory.
    pub(super) fn take_ahead(
        &mut self,
        features: &[Feature],
        save: bool,
        stream: Stream,
    ) -> Result<Option<KnownIds>> {
        if self.ahead.lookups.is_empty() || !save {
            return Ok(None);
        }
        let Some(forms) = forms_of(features) else {
            // What was told was this lookup.
            let begun = self.ahead.lookups.pop_front().and_then(|lookup| lookup.begun);
            self.end_ahead(begun)?;
            return Ok(None);
        };
        while let Some(lookup) = self.ahead.lookups.pop_front() {
            if lookup.forms != forms {
                self.end_ahead(lookup.begun)?;
                continue;
            }
            let Some(Begun { window, asking, at_owner, started, mut scratch, done }) = lookup.begun else {
                return Ok(None);
            };
            stream.wait(&done)?;
            self.front.workspace.take_scratch(&mut scratch);
            self.front.workspace.forget(started);
            self.ahead.spare_scratches.extend(scratch);
            return Ok(Some(KnownIds { window, asking, at_owner }));
        }
        Ok(None)
    }

    /// Takes back the memory with which a lookup has asked.
    pub(super) fn reuse_asking(&mut self, asking: Asking) {
        self.ahead.spare_askings.push(asking);
    }

    /// Takes back the memory of a lookup that is not made.
    fn end_ahead(&mut self, begun: Option<Begun>) -> Result<()> {
        let Some(Begun { window, asking, started, scratch, done, .. }) = begun else { return Ok(()) };
        if let Some(stream) = self.front.workspace.last_stream() {
            // Later work there reuses its memory.
            stream.wait(&done)?;
        }
        self.front.reuse_window(Some(window));
        self.front.workspace.forget(started);
        self.ahead.spare_scratches.extend(scratch);
        self.ahead.spare_askings.push(asking);
        Ok(())
    }
}
