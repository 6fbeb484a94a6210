//! The tables of a layer, on the host or on a GPU.

use sok_core::error::{Error, Result};
use sok_core::host_group::{Binding, HostGroup};
use sok_core::table::Table;
use sok_cuda::gpu_group::GpuGroup;

pub enum Tables {
    Host(Box<HostGroup>),
    Gpu(Box<GpuGroup>),
}

macro_rules! each {
    ($self:ident, $group:ident => $call:expr) => {
        match $self {
            Tables::Host($group) => $call,
            Tables::Gpu($group) => $call,
        }
    };
}

impl Tables {
    /// # Errors
    /// [`Error::Device`] if they are on a GPU and the tensors of the call are not.
    pub fn host(&mut self) -> Result<&mut HostGroup> {
        match self {
            Tables::Host(group) => Ok(group),
            Tables::Gpu(group) => Err(Error::Device(format!(
                "the tables {} are on a GPU, but the tensors of this call are on the host. Run the model on the GPU, or use \
                 `storage=\"host\"`",
                group.names()
            ))),
        }
    }

    /// # Errors
    /// [`Error::Device`] if they are on the host.
    pub fn gpu(&mut self) -> Result<&mut GpuGroup> {
        match self {
            Tables::Gpu(group) => Ok(group),
            Tables::Host(group) => {
                Err(Error::Device(format!("the tables {} are on the host, not on the GPU", group.names())))
            }
        }
    }

    pub fn tables_mut(&mut self) -> Vec<&mut dyn Table> {
        each!(self, group => group.tables_mut().collect())
    }

    pub fn num_tables(&self) -> usize {
        each!(self, group => group.num_tables())
    }

    pub fn table(&self, number: usize) -> &dyn Table {
        each!(self, group => group.table(number))
    }

    pub fn table_mut(&mut self, number: usize) -> &mut dyn Table {
        each!(self, group => group.table_mut(number))
    }

    pub fn names(&self) -> String {
        each!(self, group => group.names())
    }

    /// Without `waits` those of the last commit count, which may be over.
    ///
    /// # Errors
    /// What the device found in the last commit.
    pub fn pending_pushes(&mut self, waits: bool) -> Result<usize> {
        match self {
            Tables::Host(group) => Ok(group.pending_pushes()),
            Tables::Gpu(group) if waits => group.pending_pushes(),
            Tables::Gpu(group) => Ok(group.known_pushes()),
        }
    }

    /// Bytes that steps keep for later ones.
    pub fn step_bytes(&self) -> usize {
        each!(self, group => group.step_bytes())
    }

    /// Name and number of refused keys since the last call, of tables whose check mode is to warn.
    pub fn take_refused(&mut self) -> Vec<(String, u64)> {
        each!(self, group => group.take_refused())
    }

    pub fn binding(&self) -> Option<&Binding> {
        each!(self, group => group.binding())
    }

    pub fn bind(&mut self, binding: Binding) -> Result<()> {
        each!(self, group => group.bind(binding))
    }
}
