//! Small data that travel to the device in the parameters of launches, so that no copy from the host is needed.

#![allow(unsafe_code)]

use sok_core::error::Result;

use crate::abi::Delivery;
use crate::device::{Device, Stream, launch_next};
use crate::kernels::CONTROL;

/// Payload size of `deliver` in words that every device can take in the parameters of a launch.
const FEW: usize = 960;
/// Larger payload sizes, for devices that take them. There are several, because unused words of a payload take time too.
const MORE: [usize; 2] = [2016, 8128];

/// Returns the payload size of `deliver` for this many words. It may be smaller, which takes several launches.
pub(crate) fn at_once(device: &Device, words: usize) -> usize {
    if words <= FEW || device.parameter_bytes <= 4096 {
        return FEW;
    }
    MORE.into_iter().find(|room| words <= *room).unwrap_or(MORE[1])
}

/// Enqueues writing words to the device. `zeros`: address and number of words that are set to 0. `number`: an address, and the number of a
/// lookup that is written there.
///
/// # Errors
/// [`Error::Device`](sok_core::Error::Device) if a kernel cannot be compiled or launched.
pub(crate) fn deliver(
    device: &Device,
    to: u64,
    values: &[u32],
    zeros: (u64, usize),
    number: Option<(u64, u64)>,
    stream: Stream,
) -> Result<()> {
    let room = at_once(device, values.len());
    let deliver = device.kernel(&CONTROL, &format!("deliver<{room}>"))?;
    let mut payload = vec![0u32; room];
    // Without values there may be words to set to 0, or a number.
    let empty = values.is_empty().then_some(values);
    for (i, chunk) in values.chunks(room).chain(empty).enumerate() {
        payload[..chunk.len()].copy_from_slice(chunk);
        let (number_to, number) = number.filter(|_| i == 0).unwrap_or_default();
        let (zeros, num_zeros) = if i == 0 { zeros } else { (0, 0) };
        let delivery = Delivery {
            to: to + 4 * (i * room) as u64,
            zeros,
            count: chunk.len() as u32,
            num_zeros: num_zeros as u32,
            number_to,
            number: [number as u32, (number >> 32) as u32],
            pad: [0; 2],
        };
        // SAFETY: The arguments have the types of the kernel's parameters. The caller keeps the memory that they point to.
        unsafe { launch_next!(deliver, stream, 1, 1024, delivery, payload[0]) }?;
    }
    Ok(())
}
