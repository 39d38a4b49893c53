/* test_key_file.c - keys in files: made once, read whole, refused with the line that is wrong. */
#include "common/key_file.h"

#include "tests/unit/common/helpers.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEY   "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
#define SHORT "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf"

static const char *write_file(void **state, const char *name, const char *text, mode_t mode)
{
    const char *path = helpers_path(state, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(path, mode), 0);
    return path;
}

static void test_a_pair_is_made(void **state)
{
    char public[SOCKET_KEY_SIZE], secret[SOCKET_KEY_SIZE], read[SOCKET_KEY_SIZE], error[KEY_FILE_ERROR_SIZE];
    struct stat status;
    assert_int_equal(key_file_make(helpers_path(state, "alice"), public, error), 0);
    assert_int_equal(stat(helpers_path(state, "alice.secret"), &status), 0);
    assert_int_equal(status.st_mode & 07777, 0600);
    assert_int_equal(stat(helpers_path(state, "alice.public"), &status), 0);
    assert_int_equal(status.st_mode & 07777, 0644);
    assert_int_equal(key_file_public(helpers_path(state, "alice.public"), read, error), 0);
    assert_string_equal(read, public);
    assert_int_equal(key_file_secret(helpers_path(state, "alice.secret"), secret, error), 0);
    assert_string_not_equal(secret, public);
    assert_int_equal(socket_public_key(secret, read), 0);
    assert_string_equal(read, public);
}

static void test_a_key_is_never_replaced(void **state)
{
    char public[SOCKET_KEY_SIZE], first[SOCKET_KEY_SIZE], error[KEY_FILE_ERROR_SIZE];
    assert_int_equal(key_file_make(helpers_path(state, "a"), first, error), 0);
    assert_int_equal(key_file_make(helpers_path(state, "a"), public, error), -EEXIST);
    assert_non_null(strstr(error, "a.secret exists"));
    assert_int_equal(unlink(helpers_path(state, "a.secret")), 0);
    assert_int_equal(key_file_make(helpers_path(state, "a"), public, error), -EEXIST);
    assert_non_null(strstr(error, "a.public exists"));
    assert_int_equal(access(helpers_path(state, "a.secret"), F_OK), -1); /* a pair or nothing */
    assert_int_equal(key_file_public(helpers_path(state, "a.public"), public, error), 0);
    assert_string_equal(public, first);

    assert_int_equal(key_file_make(helpers_path(state, "none/a"), public, error), -ENOENT);
    assert_int_equal(key_file_make(helpers_path(state, ""), public, error), -EINVAL);
}

static void test_lists(void **state)
{
    char error[KEY_FILE_ERROR_SIZE];
    struct key_list list;
    const char *path = write_file(state, "list",
                                  "# who may come\n\n" KEY "\n  " KEY "\tpublic key alice\r\n#\n" KEY " bob\n"
                                  "#" SHORT "x too long for a key\n" KEY,
                                  0644);
    assert_int_equal(key_file_list(path, &list, error), 0);
    assert_int_equal(list.n_keys, 4);
    assert_string_equal(list.keys[0], KEY);
    assert_string_equal(list.keys[1], KEY);
    assert_string_equal(list.keys[2], KEY);
    assert_string_equal(list.keys[3], KEY);
    free(list.keys);

    FILE *file = fopen(helpers_path(state, "many"), "w");
    assert_non_null(file);
    for (int i = 0; i < 1000; i++)
        assert_true(fputs(KEY "\n", file) >= 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(key_file_list(helpers_path(state, "many"), &list, error), 0);
    assert_int_equal(list.n_keys, 1000);
    assert_string_equal(list.keys[999], KEY);
    free(list.keys);
}

static void refuse(void **state, const char *text, const char *part)
{
    char error[KEY_FILE_ERROR_SIZE] = "";
    struct key_list list = {.n_keys = 77};
    int n = helpers_n_descriptors();
    assert_int_equal(key_file_list(write_file(state, "bad", text, 0644), &list, error), -EINVAL);
    if (!strstr(error, part))
        fail_msg("\"%s\" does not say \"%s\"", error, part);
    assert_int_equal(list.n_keys, 77);
    assert_int_equal(helpers_n_descriptors(), n);
}

static void test_what_is_no_list(void **state)
{
    refuse(state, "", "holds no key");
    refuse(state, "# nobody\n", "holds no key");
    refuse(state, KEY "\n" SHORT "\n", "line 2: this is no key");
    refuse(state, KEY "\n\nhello\n", "line 3: this is no key");
    refuse(state, "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]y~~\n", "line 1");
    refuse(state, KEY " public\n" KEY " secret key alice\n", "line 2: this is a secret key; a public one is needed");

    char error[KEY_FILE_ERROR_SIZE];
    struct key_list list;
    assert_int_equal(key_file_list(helpers_path(state, "none"), &list, error), -ENOENT);
    assert_non_null(strstr(error, "No such file"));
    assert_int_equal(key_file_list(*state, &list, error), -EINVAL);
    assert_non_null(strstr(error, "is no file"));

    FILE *file = fopen(helpers_path(state, "nul"), "w");
    assert_non_null(file);
    assert_int_equal(fwrite(KEY "\0\n", sizeof(KEY) + 1, 1, file), 1);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(key_file_list(helpers_path(state, "nul"), &list, error), -EINVAL);
    assert_int_equal(mkfifo(helpers_path(state, "fifo"), 0600), 0);
    assert_int_equal(key_file_list(helpers_path(state, "fifo"), &list, error), -EINVAL); /* and does not wait */
}

static void test_what_is_no_single_key(void **state)
{
    char key[SOCKET_KEY_SIZE] = "untouched", error[KEY_FILE_ERROR_SIZE];
    assert_int_equal(key_file_secret(write_file(state, "open", KEY "\n", 0604), key, error), -EPERM);
    assert_non_null(strstr(error, "chmod 600"));
    assert_int_equal(key_file_secret(write_file(state, "group", KEY "\n", 0660), key, error), -EPERM);
    assert_int_equal(key_file_secret(write_file(state, "public", KEY " public key x\n", 0600), key, error), -EINVAL);
    assert_non_null(strstr(error, "a secret one is needed"));
    assert_int_equal(key_file_public(write_file(state, "secret", KEY " secret key x\n", 0600), key, error), -EINVAL);
    assert_int_equal(key_file_public(write_file(state, "two", KEY "\n" KEY "\n", 0600), key, error), -EINVAL);
    assert_non_null(strstr(error, "holds 2 keys; one is needed"));
    assert_string_equal(key, "untouched");
    assert_int_equal(key_file_secret(write_file(state, "read", KEY "\n", 0640), key, error), 0); /* a group may */
    assert_string_equal(key, KEY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_pair_is_made, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(test_a_key_is_never_replaced, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(test_lists, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(test_what_is_no_list, helpers_folder, helpers_remove_folder),
        cmocka_unit_test_setup_teardown(test_what_is_no_single_key, helpers_folder, helpers_remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
