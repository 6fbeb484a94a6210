//! The traits that every table and every group implements, on the host or on a GPU, and the arguments of their calls.

pub mod batch;
pub mod binding;
pub mod departures;
pub mod epochs;
pub mod frozen;
pub mod general;
pub mod gradients;
pub mod group;
pub mod profile;
pub mod record;
pub mod records;
pub mod table;
pub mod tensor;
pub mod ticket;
