//! Inside a machine: finds the memory that it shares with its service.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shared_ring::SharedMemory;

use crate::region;

/// Where the kernel lists the devices of PCI.
pub const DEVICES: &str = "/sys/bus/pci/devices";

/// The shared memory of qemu (ivshmem), by vendor and device, and which of its resources is the
/// memory.
const VENDOR: &str = "0x1af4";
const DEVICE: &str = "0x1110";
const MEMORY: &str = "resource2";

/// The first such device below a folder of devices.
///
/// # Errors
///
/// There is none, or the folder cannot be read.
pub fn find(devices: &Path) -> io::Result<PathBuf> {
    let is = |path: &Path, file: &str, want: &str| {
        fs::read_to_string(path.join(file)).is_ok_and(|text| text.trim() == want)
    };
    let mut all: Vec<PathBuf> =
        fs::read_dir(devices)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    all.sort();
    let device = all.into_iter().find(|d| is(d, "vendor", VENDOR) && is(d, "device", DEVICE));
    device.ok_or_else(|| {
        let text = "no shared memory among the PCI devices: qemu needs -device ivshmem-plain";
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}

/// Maps the memory of a device, which is enabled if it is not.
///
/// # Errors
///
/// The kernel's.
pub fn map(device: &Path) -> io::Result<Arc<SharedMemory>> {
    fs::write(device.join("enable"), "1")?;
    let memory = File::options().read(true).write(true).open(device.join(MEMORY))?;
    region::map_device(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_found_by_its_numbers() {
        let dir = std::env::temp_dir().join(format!("heddle-machine-{}", std::process::id()));
        for (name, vendor, device) in
            [("a", "0x1af4", "0x1000"), ("b", "0x8086", "0x1110"), ("c", "0x1af4", "0x1110")]
        {
            fs::create_dir_all(dir.join(name)).unwrap();
            fs::write(dir.join(name).join("vendor"), format!("{vendor}\n")).unwrap();
            fs::write(dir.join(name).join("device"), format!("{device}\n")).unwrap();
        }
        assert_eq!(find(&dir).unwrap(), dir.join("c"));
        fs::remove_dir_all(dir.join("c")).unwrap();
        assert_eq!(find(&dir).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::remove_dir_all(&dir).unwrap();
    }
}
