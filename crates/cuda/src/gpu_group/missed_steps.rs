//! Update modes other than local: rows without a gradient take each step with a gradient of zero, at once or when they are read next.

use sok_core::contract::binding::{Binding, UpdateMode};
use sok_core::error::Result;

use super::GpuGroup;
use crate::abi::{MISSED_STEPS, Missed, PREPARED_WORDS};
use crate::device::Stream;
use crate::gpu_table::GpuTable;
use crate::memory::Buffer;
use crate::step::{By, Saved, Started};

/// The newest steps of the optimizers of a group.
pub(super) struct MissedSteps {
    mode: UpdateMode,
    /// By optimizer: the `Prepared` of its steps.
    steps: Buffer<u32>,
    /// Number of steps so far.
    now: Buffer<u32>,
    /// Maximum number of steps since all rows have taken theirs.
    num_missed: usize,
}

impl MissedSteps {
    fn of(&self, optimizer: usize) -> Missed {
        Missed { steps: self.steps.at(optimizer * MISSED_STEPS * PREPARED_WORDS), now: self.now.address() }
    }
}

impl GpuGroup {
    /// Sets which rows a step of the optimizers updates. No row may have missed a step.
    ///
    /// # Errors
    /// [`Error::Device`](sok_core::Error::Device) without enough memory.
    pub(super) fn set_mode(&mut self, binding: &Binding) -> Result<()> {
        let misses =
            |table: &GpuTable| binding.mode != UpdateMode::Local && !binding.update_of(&table.config).rests();
        let (context, num_optimizers) = (&self.workspace.device.context, self.workspace.num_optimizers());
        let new = || -> Result<MissedSteps> {
            Ok(MissedSteps {
                mode: binding.mode,
                steps: Buffer::new(context, num_optimizers * MISSED_STEPS * PREPARED_WORDS)?,
                now: Buffer::new(context, 1)?,
                num_missed: 0,
            })
        };
        let missed = self.tables.iter().any(misses).then(new).transpose()?;
        let now = missed.as_ref().map(|missed| missed.now.address());
        let taken = |table: &GpuTable| {
            now.filter(|_| misses(table)).map(|now| table.new_taken_steps(now)).transpose()
        };
        let taken = self.tables.iter().map(taken).collect::<Result<Vec<_>>>()?;
        // Steps in progress use the memory of those before.
        self.workspace.device.synchronize()?;
        for (table, taken) in self.tables.iter_mut().zip(taken) {
            table.count_taken_steps(taken);
        }
        self.missed = missed;
        self.tables.iter().try_for_each(|table| table.start_rows(Stream::DEFAULT))?;
        self.workspace.device.synchronize()
    }

    /// Enqueues that rows with gradients take the steps before this one that they have missed.
    pub(super) fn begin_steps(&self, saved: &Saved, by: &By, stream: Stream) -> Result<()> {
        match &self.missed {
            Some(missed) if !by.update.rests() => {
                self.workspace.begin_steps(saved, by, missed.of(by.optimizer), stream)
            }
            _ => Ok(()),
        }
    }

    /// Enqueues noting a step, and that all rows take it, unless they do so when they are read.
    pub(super) fn end_steps_of_rows(&mut self, binding: &Binding, stream: Stream) -> Result<()> {
        // The rows that the commit removes take no step.
        self.workspace.join_uses(stream)?;
        let Some(missed) = &mut self.missed else { return Ok(()) };
        let (steps, now) = (missed.steps.address(), missed.now.address());
        self.workspace.note_step(self.resolved.address(), self.prepared.address(), steps, now, stream)?;
        missed.num_missed += 1;
        // The row of an out-of-vocabulary key is read without a lookup, and rows that go may be kept.
        let reads =
            |table: &GpuTable| table.config.out_of_vocabulary_key.is_some() || table.config.keeps_removed();
        if missed.mode == UpdateMode::Global || missed.num_missed == MISSED_STEPS {
            return self.catch_up_all(binding, stream);
        }
        let mut numbers = (0..self.tables.len()).filter(|number| reads(&self.tables[*number]));
        numbers.try_for_each(|number| self.catch_up_table(number, binding, stream))
    }

    /// Enqueues that all rows take the steps that they have missed.
    fn catch_up_all(&mut self, binding: &Binding, stream: Stream) -> Result<()> {
        (0..self.tables.len()).try_for_each(|number| self.catch_up_table(number, binding, stream))?;
        self.missed.iter_mut().for_each(|missed| missed.num_missed = 0);
        Ok(())
    }

    fn catch_up_table(&self, number: usize, binding: &Binding, stream: Stream) -> Result<()> {
        let (Some(missed), table) = (&self.missed, &self.tables[number]) else { return Ok(()) };
        if !table.counts_taken_steps() {
            return Ok(());
        }
        let (missed, update) = (missed.of(table.config.optimizer), binding.update_of(&table.config));
        self.workspace.catch_up_all(&self.tables, number, update, missed, stream)
    }

    /// As `catch_up_all`, if rows may have missed steps.
    pub(super) fn catch_up_tables(&mut self) -> Result<()> {
        let Some(binding) = self.binding.clone().filter(|_| self.is_behind()) else { return Ok(()) };
        let stream = self.workspace.last_stream().unwrap_or(Stream::DEFAULT);
        self.workspace.enter(stream)?;
        self.catch_up_all(&binding, stream)
    }

    fn is_behind(&self) -> bool {
        self.missed.as_ref().is_some_and(|missed| missed.num_missed > 0)
    }

    /// Enqueues that the rows of a lookup take the steps that they have missed.
    pub(super) fn catch_up_found(&self, started: &Started, stream: Stream) -> Result<()> {
        let (Some(missed), Some(binding), true) = (&self.missed, &self.binding, self.is_behind()) else {
            return Ok(());
        };
        for optimizer in 0..self.workspace.num_optimizers() {
            let update = binding.update_by(optimizer);
            if !update.rests() {
                self.workspace.catch_up_found(started, optimizer, update, missed.of(optimizer), stream)?;
            }
        }
        Ok(())
    }
}
