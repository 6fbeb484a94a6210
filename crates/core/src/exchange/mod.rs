//! How ranks share tables: who owns a key, and how messages travel.
//!
//! A rank is a process with one device. Every rank runs the same program, so ranks make the same calls in the same order, and each call
//! that needs other ranks exchanges messages with all of them. A message carries its call in its [`Tag`](message::Tag).

pub mod buckets;
pub mod collectives;
pub mod communicator;
mod mailbox;
pub mod message;
pub mod placement;
pub mod polled;
pub mod tcp;
pub mod threads;
pub mod transport;
