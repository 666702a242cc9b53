/* The DLPack structs (dlpack.h 1.1, the exchange table of 1.3), and how exported memory is given back.

   A consumer may call a deleter from any thread, with or without the GIL, and as late as the exit of the
   process. So deleters are C, take the GIL only while an interpreter runs, and otherwise leave the owner to
   the system. */
#ifndef EPCOMM_DLPACK_H
#define EPCOMM_DLPACK_H

#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
  DL_CPU = 1,
  DL_CUDA = 2,
  DL_CUDA_HOST = 3,
  DL_CUDA_MANAGED = 13,
};
enum {
  DL_READ_ONLY = 1,
  DL_COPIED = 2,
};

typedef struct {
  int32_t device_type, device_id;
} DLDevice;
typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} DLDataType;
typedef struct {
  uint32_t major, minor;
} DLPackVersion;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides; /* strides in elements; NULL = C order */
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensor*);
} DLManagedTensor;

typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned*);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

typedef struct {
  DLPackVersion version;
  void* previous;
  void (*allocate)(void); /* not used here */
  int (*managed_from_object)(void*, DLManagedTensorVersioned**);
  int (*managed_to_object)(DLManagedTensorVersioned*, void**);
  int (*tensor_from_object)(void*, DLTensor*);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void**);
} DLPackExchangeAPI;

static int interpreter_runs(void) {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

static void release_owner(void* owner) {
  PyGILState_STATE state;
  if (!interpreter_runs()) return;
  state = PyGILState_Ensure();
  Py_DECREF((PyObject*)owner);
  PyGILState_Release(state);
}

static void delete_versioned(DLManagedTensorVersioned* m) {
  release_owner(m->manager_ctx);
  free(m);
}
static void delete_unversioned(DLManagedTensor* m) {
  release_owner(m->manager_ctx);
  free(m);
}

/* Copies shape and strides behind the struct, so that one free() gives all of it back. */
static void place(DLTensor* to, const DLTensor* from, int64_t* dims) {
  size_t n = (size_t)from->ndim;
  *to = *from;
  to->shape = dims;
  to->strides = dims + n;
  memcpy(to->shape, from->shape, n * sizeof(int64_t));
  memcpy(to->strides, from->strides, n * sizeof(int64_t));
}

static DLManagedTensorVersioned* new_versioned(PyObject* owner, const DLTensor* tensor, uint64_t flags) {
  DLManagedTensorVersioned* m = malloc(sizeof *m + 2 * (size_t)tensor->ndim * sizeof(int64_t));
  if (m == NULL) return (void*)PyErr_NoMemory();
  place(&m->dl_tensor, tensor, (int64_t*)(m + 1));
  m->version.major = 1;
  m->version.minor = 1;
  m->flags = flags;
  m->deleter = delete_versioned;
  m->manager_ctx = owner;
  Py_INCREF(owner);
  return m;
}

static DLManagedTensor* new_unversioned(PyObject* owner, const DLTensor* tensor) {
  DLManagedTensor* m = malloc(sizeof *m + 2 * (size_t)tensor->ndim * sizeof(int64_t));
  if (m == NULL) return (void*)PyErr_NoMemory();
  place(&m->dl_tensor, tensor, (int64_t*)(m + 1));
  m->deleter = delete_unversioned;
  m->manager_ctx = owner;
  Py_INCREF(owner);
  return m;
}

/* Capsules that nobody consumed still own their tensor; consumed ones were renamed. */
static void drop_versioned(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    DLManagedTensorVersioned* m = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    m->deleter(m);
  }
}

static void drop_unversioned(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor")) {
    DLManagedTensor* m = PyCapsule_GetPointer(capsule, "dltensor");
    m->deleter(m);
  }
}

/* What numpy's __array_struct__ capsule holds (numpy's array interface, version 3). */
typedef struct {
  int two, nd;
  char typekind;
  int itemsize, flags;
  Py_intptr_t *shape, *strides; /* strides in bytes */
  void* data;
  PyObject* descr;
} ArrayStruct;
enum {
  ARRAY_C_CONTIGUOUS = 0x1,
  ARRAY_WRITEABLE = 0x400,
};

#endif
